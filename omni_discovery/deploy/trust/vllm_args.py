"""The arguments of vLLM's engine that are mere settings: numbers, choices, sizes. All others are closed. Pure.

An argument that is not listed, as one of a later vLLM, can name code, files or addresses for all that is known here, so
a document from etcd may only use it where the host allows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: One word of vLLM's own: a dtype, a backend, a method. No path, no address, no class of a module.
_WORD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_+:-]{0,127}")
#: Free text for arguments that only name or count something.
_TEXT: Final = re.compile(r"[^\x00-\x1f]{0,1024}")
#: A branch, a tag or a commit: libraries make a path below the model hub's cache of it.
_REVISION: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*")
_LONGEST_REVISION: Final = 255

#: Arguments whose value is a number, yes or no, a word, or a list of those.
SETTINGS: Final = frozenset(
    (
        *("aggregate_engine_logging", "all2all_backend", "allow_deprecated_quantization", "async_scheduling"),
        *("attention_backend", "block_size", "config_format", "convert", "cp_kv_cache_interleave_size"),
        *("cpu_distributed_timeout_seconds", "cpu_offload_gb", "cudagraph_capture_sizes", "cudagraph_metrics"),
        *("data_parallel_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "dcp_comm_backend"),
        *("dcp_kv_cache_interleave_size", "dcp_q_replicate", "decode_context_parallel_size"),
        *("disable_cascade_attn", "disable_chunked_mm_input", "disable_custom_all_reduce"),
        *("disable_hybrid_kv_cache_manager", "disable_log_stats", "disable_nccl_for_dp_synchronization"),
        *("disable_sliding_window", "distributed_timeout_seconds", "dp_sync_interval", "dtype"),
        *("enable_batch_sharded_sampling", "enable_chunked_prefill", "enable_cumem_allocator", "enable_dbo"),
        *("enable_eplb", "enable_ep_weight_filter", "enable_expert_parallel", "enable_fault_tolerance"),
        *("enable_flashinfer_autotune", "enable_hc_sp", "enable_layerwise_nvtx_tracing"),
        *("enable_logging_iteration_details", "enable_lora", "enable_mamba_cache_stochastic_rounding"),
        *("enable_mamba_shared_prefix_checkpoint", "enable_mfu_metrics", "enable_mixed_moe_lora_format"),
        *("enable_mm_embeds", "enable_mm_processor_stats", "enable_moe_shared_loras", "enable_nccl_comm_suspend"),
        *("enable_prefix_caching", "enable_prompt_embeds", "enable_return_routed_experts", "enable_shm_tensor_arena"),
        *("enable_sleep_mode", "enable_tower_connector_lora", "enforce_eager", "expert_placement_strategy"),
        *("fully_sharded_loras", "gdn_prefill_backend", "gpu_memory_utilization", "interleave_mm_strings"),
        *("jit_monitor_mode", "jit_monitor_verbose", "kda_decode_backend", "kda_prefill_backend", "kv_cache_dtype"),
        *("kv_cache_memory_bytes", "kv_cache_metrics", "kv_cache_metrics_sample", "kv_sharing_fast_prefill"),
        *("language_model_only", "linear_backend", "log_level", "logprobs_mode", "long_prefill_token_threshold"),
        *("long_prefill_token_threshold_adaptive", "lora_dtype", "mamba_backend", "mamba_block_size"),
        *("mamba_cache_dtype", "mamba_cache_mode", "mamba_cache_philox_rounds", "mamba_ssm_cache_dtype"),
        *("mamba_ssu_algorithm", "max_cpu_loras", "max_cudagraph_capture_size", "max_logprobs", "max_lora_rank"),
        *("max_loras", "max_model_len", "max_num_active_seqs", "max_num_batched_tokens", "max_num_partial_prefills"),
        *("max_long_partial_prefills", "max_num_queued_reqs", "max_num_queued_tokens", "max_num_scheduled_tokens"),
        *("max_num_seqs", "max_parallel_loading_workers", "mm_device_do_normalize", "mm_encoder_attn_backend"),
        *("mm_encoder_attn_dtype", "mm_encoder_only", "mm_encoder_tp_mode", "mm_hasher_algorithm"),
        *("mm_ipc_gpu_memory_gb", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_processor_device"),
        *("mm_shm_cache_max_object_size_mb", "moe_backend", "num_gpu_blocks_override", "num_lookahead_slots"),
        *("numa_bind", "numa_bind_nodes", "offload_backend", "offload_group_size", "offload_num_in_group"),
        *("offload_prefetch_step", "optimization_level", "per_request_spec_decode_metrics", "performance_mode"),
        *("pipeline_parallel_size", "prefill_context_parallel_size", "prefill_schedule_interval"),
        *("prefix_cache_retention_interval", "prefix_caching_hash_algo", "prefix_match_unit", "reasoning_parser"),
        *("renderer_num_workers", "replayssm_buffer_len", "return_sampling_mask", "runner"),
        *("safetensors_load_strategy", "safetensors_prefetch_block_size", "safetensors_prefetch_num_threads"),
        *("scheduler_reserve_full_isl", "scheduling_policy", "seed", "show_hidden_metrics_for_version"),
        *("skip_mm_profiling", "skip_tokenizer_init", "sleep_mode_offload_cudagraph"),
        *("sparse_indexer_topk_backend", "spec_tokens", "specialize_active_lora", "stream_interval"),
        *("swa_bounded_replay", "swap_space", "tensor_parallel_size", "tokenizer_mode", "ubatch_size"),
        *("use_fp64_gumbel", "use_replayssm", "use_tqdm_on_load", "video_pruning_method", "video_pruning_rate"),
        "watermark",
    )
)
#: Arguments, and keys of them, whose value is a branch, a tag or a commit of a model hub.
REVISIONS: Final = frozenset(("revision", "tokenizer_revision", "code_revision"))
#: Arguments whose value is text that names something, and is neither opened nor imported.
NAMES: Final = frozenset(
    (
        *("served_model_name", "ignore_patterns"),
        *("lora_target_modules", "cpu_offload_params", "offload_params", "kv_cache_dtype_skip_layers"),
    )
)
#: Arguments that are mappings of numbers under any keys.
TABLES: Final = frozenset(("limit_mm_per_prompt", "media_io_kwargs", "override_generation_config"))
#: Arguments that are mappings, with their keys that are mere settings.
PARTS: Final[Mapping[str, frozenset[str]]] = {
    "kv_transfer_config": frozenset(
        (
            *("kv_connector", "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_role", "kv_rank"),
            *("kv_parallel_size", "kv_port", "enable_permute_local_kv", "kv_load_failure_policy"),
        )
    ),
    "structured_outputs_config": frozenset(
        (
            *("backend", "disable_any_whitespace", "disable_additional_properties", "disable_fallback"),
            *("enable_in_reasoning", "reasoning_parser"),
        )
    ),
    "pooler_config": frozenset(
        (
            *("task", "pooling_type", "seq_pooling_type", "tok_pooling_type", "use_activation", "normalize", "softmax"),
            *("activation", "dimensions", "enable_chunked_processing", "max_embed_len", "logit_mean", "logit_sigma"),
            *("logit_bias", "logit_scale", "step_tag_id", "returned_token_ids", "enable_flash_late_interaction"),
        )
    ),
    "compilation_config": frozenset(
        (
            *("mode", "level", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
            *("cudagraph_num_of_warmups", "cudagraph_specialize_lora", "use_inductor", "compile_sizes"),
        )
    ),
    "attention_config": frozenset(("backend", "flash_attn_version", "use_trtllm_attention", "mla_prefill_backend")),
    "speculative_config": frozenset(
        (
            *("method", "num_speculative_tokens", "draft_tensor_parallel_size", "tensor_parallel_size"),
            *("max_model_len", "revision", "enforce_eager", "prompt_lookup_max", "prompt_lookup_min"),
            *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "parallel_drafting"),
            *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob", "disable_padded_drafter_batch"),
        )
    ),
    "kv_transfer_config.kv_connector_extra_config": frozenset(
        ("mooncake_bootstrap_port", "mooncake_protocol", "num_workers", "num_threads", "backends", "kv_lease_duration")
    ),
}
#: Arguments, and keys of them, that hold models: a folder under the model root, or a name.
MODELS: Final = frozenset(
    ("tokenizer", "hf_config_path", "spec_model", "model_weights", "speculative_config.model", "default_mm_loras")
)
#: Those that vLLM takes for a class of a module, and calls, where they have a dot and no slash.
MODELS_OR_CODE: Final = frozenset(("spec_model", "speculative_config.model"))
_DRAFTS: Final = frozenset(
    ("ngram", "ngram_gpu", "suffix", "eagle", "eagle3", "mtp", "deepseek_mtp", "draft_model", "mlp_speculator")
)
#: Arguments whose value may only be one of these; other values are closed. Weights that are no safetensors are apart.
CHOICES: Final[Mapping[str, frozenset[Any]]] = {
    "load_format": frozenset(("auto", "safetensors", "mistral", "fastsafetensors", "dummy")),
    "distributed_executor_backend": frozenset((None, "mp", "uni")),
    "generation_config": frozenset(("auto", "vllm")),
    "model_impl": frozenset(("auto", "vllm", "transformers")),
    "kv_transfer_config.kv_connector": frozenset(
        (
            *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector"),
            "OffloadingConnector",
        )
    ),
    "speculative_config.method": _DRAFTS,
    "spec_method": _DRAFTS | {None},
}
#: Load formats whose loader reads pickled weights, and methods of quantization that switch to such a loader.
PICKLED_FORMATS: Final = frozenset(("pt", "npcache", "hf", "bitsandbytes"))
PICKLED_METHODS: Final = frozenset(("bitsandbytes",))
#: Methods of quantization whose files are no safetensors.
_OTHER_FILES: Final = frozenset(("gguf",))
#: This project's own arguments of engine ``vllm`` that are settings; ``allow_rpc`` is none.
OWN: Final = frozenset(("allow_grammars", "handoff", "pd", "share_prefix_cache", "tool_call_parser"))
#: Words of engine ``vllm-omni`` that name something in vLLM-Omni's own tables.
WORDS_OF_OMNI: Final = frozenset(("pipeline",))
#: Arguments of engine ``vllm-omni``, its own and vLLM-Omni's, that are settings where they hold numbers alone.
OWN_OF_OMNI: Final = frozenset(
    (
        *("async_chunk", "connector_extra", "sample_rate_hz", "untested_pipeline", "max_side_px"),
        *("subtalker_sampling_params", "silence_ban_frames"),
    )
)


def is_setting(place: str, value: Any) -> bool:
    """Whether an argument of vLLM, or a key of one (``pooler_config.task``), is a mere setting with this value.

    False for what is not known. The arguments in MODELS, and ``trust_remote_code``, are not for this function.
    """
    if place in CHOICES:
        return isinstance(value, str | None) and value in CHOICES[place]
    if place == "quantization":
        return isinstance(value, str | None) and is_plain(value) and value not in PICKLED_METHODS | _OTHER_FILES
    if place == "compilation_config" and isinstance(value, int):
        return True
    outer, _, name = place.rpartition(".")
    if name in REVISIONS:
        return is_revision(value) and (not outer or name in PARTS.get(outer, ()))
    if outer:
        if name == "engine_id" and "/" in str(value):
            # vLLM makes files in /dev/shm of it.
            return False
        return name in PARTS.get(outer, ()) and (is_text(value) if name == "engine_id" else is_plain(value))
    if place in TABLES:
        return isinstance(value, Mapping) and _is_table(value)
    if place == "handoff":
        return isinstance(value, Mapping) and all(is_text(each) for each in value.values())
    return (place in SETTINGS | OWN and is_plain(value)) or (place in NAMES and is_text(value))


def is_plain(value: Any) -> bool:
    """Whether a value is nothing, a number, yes or no, one word, or a list of those."""
    if isinstance(value, list | tuple):
        return all(is_plain(each) for each in value)
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and bool(_WORD.fullmatch(value)))


def is_revision(value: Any) -> bool:
    """Whether a value is nothing, or can only name a branch, a tag or a commit: no path that leads up or away."""
    if not isinstance(value, str):
        return value is None
    return len(value) <= _LONGEST_REVISION and bool(_REVISION.fullmatch(value))


def is_text(value: Any) -> bool:
    """Whether a value is plain, or text without control characters, or a list of those."""
    if isinstance(value, list | tuple):
        return all(is_text(each) for each in value)
    return is_plain(value) or (isinstance(value, str) and bool(_TEXT.fullmatch(value)))


def is_numbers(value: Any) -> bool:
    """Whether a value is nothing, a number, yes or no, or a list or mapping of those."""
    if isinstance(value, Mapping):
        return _is_table(value)
    if isinstance(value, list | tuple):
        return all(is_numbers(each) for each in value)
    return value is None or isinstance(value, int | float)


def _is_table(value: Mapping[str, Any]) -> bool:
    return all(is_numbers(each) for each in value.values())
