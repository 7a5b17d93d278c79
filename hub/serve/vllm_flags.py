"""The flags of ``vllm serve``: their names, what each takes, and a flag's value as the argument of vLLM's engine. Pure.

The names are vLLM 0.32's. They are here because importing vLLM takes seconds, and a hub has none. Whether the vLLM of a
stage's replicas has an argument, they say themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from omni_discovery.errors import ConfigError

#: Flags that take nothing, and have a form with ``--no-``.
SWITCHES: Final = frozenset(
    (
        *("aggregate_engine_logging", "allow_deprecated_quantization", "async_scheduling", "cudagraph_metrics"),
        *("data_parallel_external_lb", "data_parallel_hybrid_lb", "data_parallel_multi_port_external_lb"),
        *("dcp_q_replicate", "disable_cascade_attn", "disable_chunked_mm_input", "disable_custom_all_reduce"),
        *("disable_hybrid_kv_cache_manager", "disable_log_stats", "disable_nccl_for_dp_synchronization"),
        *("disable_sliding_window", "enable_batch_sharded_sampling", "enable_chunked_prefill"),
        *("enable_cumem_allocator", "enable_dbo", "enable_elastic_ep", "enable_ep_weight_filter", "enable_eplb"),
        *("enable_expert_parallel", "enable_fault_tolerance", "enable_flashinfer_autotune", "enable_hc_sp"),
        *("enable_layerwise_nvtx_tracing", "enable_logging_iteration_details", "enable_lora"),
        *("enable_mamba_cache_stochastic_rounding", "enable_mamba_shared_prefix_checkpoint", "enable_mfu_metrics"),
        *("enable_mixed_moe_lora_format", "enable_mm_embeds", "enable_moe_shared_loras", "enable_nccl_comm_suspend"),
        *("enable_prefix_caching", "enable_prompt_embeds", "enable_return_routed_experts", "enable_shm_tensor_arena"),
        *("enable_sleep_mode", "enable_tower_connector_lora", "enable_trace_replay", "enforce_eager"),
        *("fail_on_environ_validation", "fully_sharded_loras", "interleave_mm_strings", "jit_monitor_verbose"),
        *("kv_cache_metrics", "kv_sharing_fast_prefill", "language_model_only"),
        *("long_prefill_token_threshold_adaptive", "mm_device_do_normalize", "mm_encoder_only", "numa_bind"),
        *("ray_workers_use_nsight", "return_sampling_mask", "scheduler_reserve_full_isl", "skip_mm_profiling"),
        *("skip_tokenizer_init", "sleep_mode_offload_cudagraph", "specialize_active_lora", "swa_bounded_replay"),
        *("trust_remote_code", "use_fp64_gumbel", "use_replayssm", "use_tqdm_on_load"),
    )
)
#: Those that take one text.
TEXTS: Final = frozenset(
    (
        *("all2all_backend", "allowed_local_media_path", "attention_backend", "code_revision", "config_format"),
        *("convert", "data_parallel_address", "data_parallel_backend", "dcp_comm_backend"),
        *("distributed_executor_backend", "download_dir", "dtype", "expert_placement_strategy"),
        *("gdn_prefill_backend", "generation_config", "hf_config_path", "hf_token", "io_processor_plugin"),
        *("jit_monitor_mode", "kda_decode_backend", "kda_prefill_backend", "kv_cache_dtype", "kv_offloading_backend"),
        *("linear_backend", "load_format", "log_config_file", "log_level", "logprobs_mode", "lora_dtype"),
        *("mamba_backend", "mamba_cache_dtype", "mamba_cache_mode", "mamba_ssm_cache_dtype", "mamba_ssu_algorithm"),
        *("master_addr", "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
        *("mm_encoder_fp8_scale_save_path", "mm_encoder_tp_mode", "mm_hasher_algorithm", "mm_processor_cache_type"),
        *("mm_processor_device", "mm_tensor_ipc", "model", "model_impl", "moe_backend", "offload_backend"),
        *("optimization_level", "otlp_traces_endpoint", "per_request_spec_decode_metrics", "performance_mode"),
        *("prefix_caching_hash_algo", "quantization", "reasoning_parser", "reasoning_parser_plugin", "revision"),
        *("runner", "safetensors_load_strategy", "scheduler_cls", "scheduling_policy"),
        *("show_hidden_metrics_for_version", "sparse_indexer_topk_backend", "spec_method", "spec_model", "tokenizer"),
        *("tokenizer_mode", "tokenizer_revision", "video_pruning_method", "worker_cls", "worker_extension_cls"),
    )
)
#: Those that take a number (``4k`` is one), a JSON object, or a word in place of it, as ``auto``.
VALUES: Final = frozenset(
    (
        *("additional_config", "attention_config", "aux_output_config", "block_size", "compilation_config"),
        *("cp_kv_cache_interleave_size", "cpu_distributed_timeout_seconds", "cpu_offload_gb"),
        *("custom_histogram_buckets", "data_parallel_rank", "data_parallel_rpc_port", "data_parallel_size"),
        *("data_parallel_size_local", "data_parallel_start_rank", "dbo_decode_token_threshold"),
        *("dbo_prefill_token_threshold", "dcp_kv_cache_interleave_size", "decode_context_parallel_size"),
        *("default_mm_loras", "diffusion_config", "distributed_timeout_seconds", "dp_sync_interval"),
        *("ec_manager_config", "ec_transfer_config", "elastic_ep_max_dp_size", "engram_config", "eplb_config"),
        *("fault_tolerance_config", "gpu_memory_utilization", "hf_overrides", "ir_op_priority", "kernel_config"),
        *("kv_cache_memory_bytes", "kv_cache_metrics_sample", "kv_events_config", "kv_offloading_size"),
        *("kv_transfer_config", "limit_mm_per_prompt", "logging_config", "long_prefill_token_threshold"),
        *("mamba_block_size", "mamba_cache_philox_rounds", "master_port", "max_cpu_loras"),
        *("max_cudagraph_capture_size", "max_logprobs", "max_lora_cls_labels", "max_lora_rank", "max_loras"),
        *("max_model_len", "max_num_active_seqs", "max_num_batched_tokens", "max_num_queued_reqs"),
        *("max_num_queued_tokens", "max_num_scheduled_tokens", "max_num_seqs", "max_parallel_loading_workers"),
        *("media_io_kwargs", "mm_encoder_fp8_scale_save_margin", "mm_ipc_gpu_memory_gb", "mm_processor_cache_gb"),
        *("mm_processor_kwargs", "mm_shm_cache_max_object_size_mb", "model_class_overrides"),
        *("model_loader_extra_config", "nnodes", "node_rank", "num_gpu_blocks_override", "offload_group_size"),
        *("offload_num_in_group", "offload_prefetch_step", "override_generation_config", "pipeline_parallel_size"),
        *("pooler_config", "prefill_context_parallel_size", "prefill_schedule_interval"),
        *("prefix_cache_retention_interval", "prefix_match_unit", "profiler_config", "pt_load_map_location"),
        *("quantization_config", "reasoning_config", "renderer_num_workers", "replayssm_buffer_len"),
        *("safetensors_prefetch_block_size", "safetensors_prefetch_num_threads", "seed", "shutdown_timeout"),
        *("spec_tokens", "speculative_config", "stream_interval", "structured_outputs_config"),
        *("tensor_parallel_size", "ubatch_size", "video_pruning_rate", "watermark", "watermark_config"),
        *("weight_transfer_config",),
    )
)
#: Those that take one or more texts.
TEXT_LISTS: Final = frozenset(
    (
        *("allowed_media_domains", "collect_detailed_traces", "cpu_offload_params", "ignore_patterns"),
        *("kv_cache_dtype_skip_layers", "logits_processors", "lora_target_modules", "numa_bind_cpus"),
        *("offload_params", "served_model_name", "sleep_preserve_parameter_names"),
    )
)
#: Those that take one or more values.
VALUE_LISTS: Final = frozenset((*("cudagraph_capture_sizes", "numa_bind_nodes"),))
#: Flags of vLLM's server that take nothing.
SERVER_SWITCHES: Final = frozenset(
    (
        *("allow_credentials", "cohere_is_reasoning_model", "disable_fastapi_docs", "disable_uvicorn_access_log"),
        *("enable_auto_tool_choice", "enable_flash_late_interaction", "enable_force_include_usage"),
        *("enable_log_deltas", "enable_log_outputs", "enable_log_requests", "enable_offline_docs"),
        *("enable_per_request_metrics", "enable_prompt_tokens_details", "enable_request_id_headers"),
        *("enable_scale_out", "enable_server_load_tracking", "enable_ssl_refresh", "enable_tokenizer_info_endpoint"),
        *("exclude_tools_when_tool_choice_none", "grpc", "log_error_stack", "return_tokens_as_token_ids"),
        *("tokens_only", "trust_request_chat_template", "trust_request_mm_kwargs"),
    )
)
#: Those that take one value.
SERVER_VALUES: Final = frozenset(
    (
        *("allowed_headers", "allowed_methods", "allowed_origins", "anthropic_disabled_thinking_effort"),
        *("chat_template", "chat_template_content_format", "cohere_format"),
        *("data_parallel_supervisor_port", "default_chat_template_kwargs", "disable_access_log_for_endpoints"),
        *("dp_supervisor_probe_failure_threshold", "dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s"),
        *("fingerprint_mode", "fingerprint_value", "grpc_port", "h11_max_header_count"),
        *("h11_max_incomplete_event_size", "max_log_len", "middleware", "response_role", "root_path"),
        *("sse_keep_alive_interval", "ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_ciphers", "ssl_keyfile"),
        *("tool_call_parser", "tool_parser_plugin", "tool_server", "tool_strict_level", "uds", "uvicorn_log_level"),
    )
)
#: Those that take one or more.
SERVER_LISTS: Final = frozenset((*("api_key", "lora_modules"),))
#: Of the server's flags, those that a hub has itself, for every API.
OF_THE_HUB: Final = frozenset(
    (*("allowed_origins", "api_key", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),)
)
#: Of the others, those that a hub's ``--api-args`` refuses: it has a listener of its own.
WITHOUT_EFFECT: Final = frozenset(
    (
        *("grpc_port", "uds", "uvicorn_log_level", "disable_uvicorn_access_log", "disable_access_log_for_endpoints"),
        *("h11_max_incomplete_event_size", "h11_max_header_count", "enable_per_request_metrics"),
        *("enable_flash_late_interaction", "ssl_ciphers", "enable_ssl_refresh"),
        *("data_parallel_supervisor_port", "dp_supervisor_probe_interval_s"),
        *("dp_supervisor_probe_timeout_s", "dp_supervisor_probe_failure_threshold"),
        *("allow_credentials", "allowed_headers", "allowed_methods"),
    )
)

#: Short and second names of flags.
ALIASES: Final = {
    "-ac": "attention_config",
    "-cc": "compilation_config",
    "-dc": "diffusion_config",
    "-dcp": "decode_context_parallel_size",
    "-dp": "data_parallel_size",
    "-ep": "enable_expert_parallel",
    "-pcp": "prefill_context_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-q": "quantization",
    "-sc": "speculative_config",
    "-tp": "tensor_parallel_size",
    "--device-memory-utilization": "gpu_memory_utilization",
}

_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS: Final = {"k": 1, "m": 2, "g": 3, "t": 4}


def engine_value(name: str, given: bool | str | Sequence[str]) -> Any:
    """Return what a flag was given, as the value of the engine argument ``name``. Raise ConfigError for broken JSON."""
    if isinstance(given, bool):
        return given
    if not isinstance(given, str):
        return [_value(name, each) if name in VALUE_LISTS else each for each in given]
    return _value(name, given) if name in VALUES else given


def _value(name: str, text: str) -> Any:
    if amount := _AMOUNT.fullmatch(text):
        # As vLLM reads it: 1k is 1000, 1K is 1024.
        base = 1000 if amount[2].islower() else 1024
        return int(float(amount[1]) * base ** _POWERS[amount[2].lower()])
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if text[:1] in ("{", "["):
            raise ConfigError(f"--{name.replace('_', '-')} is not JSON: {error}") from error
        return text
