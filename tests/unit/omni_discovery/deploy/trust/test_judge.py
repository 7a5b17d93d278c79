"""The table of what a document from etcd may ask for: what is open, what is closed, and the flag for each."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from omni_discovery.deploy.document import StageConfig, decode_deploy
from omni_discovery.deploy.trust.bounds import Bounds, read_allow
from omni_discovery.deploy.trust.judge import JUDGED, check_document, closed_in, within
from omni_discovery.errors import ConfigError

HOST = Bounds(model_roots=("/models",))


def locate(text: str) -> tuple[str, ...]:
    """A host on which only folders below / exist."""
    return (text,) if text.startswith("/") else ()


def told(stage: Mapping[str, Any], bounds: Bounds = HOST, **document: Any) -> str:
    """The refusal of a document with one stage; empty if there is none."""
    content = {"stages": [{"stage_id": 0, "final_output": "text", **stage}], **document}
    try:
        check_document(decode_deploy(msgspec.json.encode(content), "etcd"), 0, bounds, locate)
    except ConfigError as error:
        return str(error)
    return ""


def vllm(model: str = "org/model", **engine_args: Any) -> dict[str, Any]:
    return {"engine": "vllm", "model": model, "engine_args": engine_args}


def omni(model: str = "org/model", **engine_args: Any) -> dict[str, Any]:
    return {**vllm(model, **engine_args), "engine": "vllm-omni"}


OPEN = [
    {"engine": "echo", "engine_args": {"capacity": 8, "crash_on": "a b\u00e9", "allow_rpc": ["pid"]}},
    {"engine": "diffusion", "model": "/models/painter", "engine_args": {"leave_out": ["text_encoder"]}},
    {"engine": "diffusion", "model": "org/painter", "engine_args": {"call_args": {"max_sequence_length": 256}}},
    vllm("/models/thinker", handoff={"require_token": "<|paint|>"}, dtype="float32", max_model_len=256),
    vllm(load_format="auto", trust_remote_code=False, tokenizer="org/tokenizer", revision="refs/pr/1"),
    {"engine": "diffusion", "model": "org/painter", "engine_args": {"revision": "refs/pr/1"}},
    vllm(pd="prefill", kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_producer"}),
    vllm(kv_transfer_config={"kv_connector_extra_config": {"mooncake_bootstrap_port": 8998}}),
    vllm(speculative_config={"method": "eagle", "model": "/models/draft", "num_speculative_tokens": 3}),
    vllm(spec_method="eagle3", spec_model="org/draft-0.6b", spec_tokens=3),
    vllm(spec_method="ngram", spec_tokens=3),
    vllm(pooler_config={"pooling_type": "MEAN"}, compilation_config=3, limit_mm_per_prompt={"image": {"count": 2}}),
    vllm(quantization="fp8", distributed_executor_backend="mp", generation_config="vllm"),
    {**vllm(enable_lora=True), "default_sampling_params": {"lora": {"name": "a", "path": "/models/a"}}},
    omni("/models/speaker", async_chunk=True, connector_extra={"codec_chunk_frames": 4}, dtype="bfloat16"),
    omni(pipeline="qwen3_tts", connector_extra={"codec_chunk_frames": 25, "codec_streaming": True}),
    omni(subtalker_sampling_params={"do_sample": True, "temperature": 0.9}, sample_rate_hz=24000, enforce_eager=True),
    {"engine": "echo", "runtime": {"devices": "0,1", "share_devices": True, "ray": {"num_cpus": 2}}},
]


@pytest.mark.parametrize("stage", OPEN)
def test_built_in_engines_with_settings_are_open(stage: dict[str, Any]) -> None:
    assert told(stage) == ""


TORCH = {"engine": "torch", "engine_args": {"target": "subprocess:call", "kwargs": {"args": ["id"]}}}
#: A stage, the key that is named, and the flag that opens it.
CLOSED: list[tuple[dict[str, Any], str, str]] = [
    (TORCH, "engine_args.target", "--allow target=subprocess"),
    ({"engine": "torch", "engine_args": {}}, "engine_args.target", "--allow all"),
    ({"engine": "theirs"}, "engine", "--allow engine=theirs"),
    ({"engine": "echo", "model": "/etc"}, "model", "--model-root /etc"),
    ({"engine": "echo", "model": "/"}, "model", "--allow model=/"),
    ({"engine": "diffusion", "engine_args": {"call_args": {"f": "x:y"}, "more": 1}}, "more", "--allow engine-arg=more"),
    # The model hub's cache takes it for a path.
    ({"engine": "diffusion", "engine_args": {"revision": "../srv"}}, "revision", "--allow engine-arg=revision"),
    (omni(code_revision="../srv"), "engine_args.code_revision", "--allow engine-arg=code_revision"),
    (vllm("/srv/evil"), "model", "--model-root /srv/evil"),
    (vllm("s3://bucket/model"), "model", "--allow model=s3://bucket/model"),
    (vllm("org/repo/file.gguf"), "model", "--allow model=org/repo/file.gguf"),
    (vllm(trust_remote_code=True), "engine_args.trust_remote_code", "--allow remote-code"),
    (vllm(trust_remote_code="false"), "engine_args.trust_remote_code", "--allow remote-code"),
    (vllm(load_format="pt"), "engine_args.load_format", "--allow pickled-weights"),
    (vllm(load_format="npcache"), "engine_args.load_format", "--allow pickled-weights"),
    (vllm(quantization="bitsandbytes"), "engine_args.quantization", "--allow pickled-weights"),
    (vllm(load_format="runai_streamer"), "engine_args.load_format", "--allow engine-arg=load_format"),
    (vllm(load_format=["pt"]), "engine_args.load_format", "--allow engine-arg=load_format"),
    (vllm(tokenizer="/srv/tokenizer"), "engine_args.tokenizer", "--model-root /srv/tokenizer"),
    (vllm(hf_config_path="https://x/y"), "engine_args.hf_config_path", "--allow model=https://x/y"),
    (vllm(model_weights="s3://x"), "engine_args.model_weights", "--allow model=s3://x"),
    (vllm(generation_config="/srv/g"), "engine_args.generation_config", "--model-root /srv/g"),
    (vllm(spec_model="/srv/draft"), "engine_args.spec_model", "--model-root /srv/draft"),
    (vllm(speculative_config={"model": "/srv/draft"}), "speculative_config.model", "--model-root /srv/draft"),
    # vLLM imports such a name, and calls what it finds.
    (vllm(spec_model="evil.Proposer"), "engine_args.spec_model", "--allow engine-arg=spec_model"),
    (vllm(speculative_config={"model": "evil.P"}), "speculative_config.model", "engine-arg=speculative_config"),
    (vllm(spec_method="custom_class"), "engine_args.spec_method", "--allow engine-arg=spec_method"),
    (vllm(spec_method="medusa"), "engine_args.spec_method", "--allow engine-arg=spec_method"),
    (vllm(default_mm_loras={"audio": "/srv/lora"}), "engine_args.default_mm_loras", "--model-root /srv/lora"),
    (vllm(distributed_executor_backend="os.path"), "distributed_executor_backend", "engine-arg=distributed_executor"),
    (vllm(distributed_executor_backend="evil"), "distributed_executor_backend", "engine-arg=distributed_executor"),
    ({"engine": "echo", "runtime": {"python": "/srv/bin/python"}}, "runtime.python", "--allow key=runtime.python"),
    (omni("/srv/evil"), "model", "--model-root /srv"),
    (omni(trust_remote_code=True), "engine_args.trust_remote_code", "--allow remote-code"),
    (omni(load_format="pt"), "engine_args.load_format", "--allow pickled-weights"),
    (omni(connector_extra={"path": "/srv"}), "engine_args.connector_extra", "--allow engine-arg=connector_extra"),
    (omni(pipeline="/srv/evil"), "engine_args.pipeline", "--allow engine-arg=pipeline"),
    (vllm(pipeline="qwen3_tts"), "engine_args.pipeline", "--allow engine-arg=pipeline"),
    (omni(worker_cls="evil.Worker"), "engine_args.worker_cls", "--allow engine-arg=worker_cls"),
    (omni(custom_process_input_func="evil.f"), "custom_process_input_func", "engine-arg=custom_process_input_func"),
    (vllm(async_chunk=True), "engine_args.async_chunk", "--allow engine-arg=async_chunk"),
    *(
        (vllm(**{name: value}), f"engine_args.{name}", f"--allow engine-arg={name.partition('.')[0]}")
        for name, value in {
            "worker_cls": "evil.Worker",
            "worker_extension_cls": "evil.Worker",
            "scheduler_cls": "evil.Scheduler",
            "hf_overrides": {"architectures": ["Evil"]},
            "model_class_overrides": {"a": "evil:Model"},
            "logits_processors": ["evil:Processor"],
            "reasoning_parser_plugin": "/srv/plugin.py",
            "io_processor_plugin": "evil",
            "mm_processor_kwargs": {"trust_remote_code": True},
            "additional_config": {"a": 1},
            "model_loader_extra_config": {"tensorizer_uri": "s3://a"},
            "log_config_file": "/srv/log.json",
            "profiler_config": {"torch_profiler_dir": "/srv"},
            "download_dir": "/srv",
            "allowed_local_media_path": "/",
            "otlp_traces_endpoint": "http://evil",
            "kv_events_config": {"publisher": "zmq"},
            "ec_transfer_config": {"ec_connector_module_path": "evil"},
            "hf_token": True,
            "allow_rpc": ["save_sharded_state"],
            "of_a_later_vllm": 1,
            "max_num_seqs": "evil.module:name",
            "attention_backend": "evil.Backend",
        }.items()
    ),
    *(
        (vllm(**{name: {key: value}}), f"engine_args.{name}.{key}", f"--allow engine-arg={name}")
        for name, key, value in [
            ("kv_transfer_config", "kv_connector_module_path", "evil"),
            ("kv_transfer_config", "kv_connector", "EvilConnector"),
            # It takes the address of its peer from the request's id, which clients may choose.
            ("kv_transfer_config", "kv_connector", "P2pNcclConnector"),
            ("kv_transfer_config", "engine_id", "../../dev/shm/theirs"),
            ("structured_outputs_config", "reasoning_parser_plugin", "/srv/plugin.py"),
            ("compilation_config", "backend", "evil.backend"),
            ("compilation_config", "inductor_passes", {"a": "evil.pass"}),
            ("speculative_config", "method", "custom_class"),
            ("speculative_config", "draft_load_config", {"load_format": "pt"}),
        ]
    ),
    (
        {**vllm(), "default_sampling_params": {"lora": {"name": "a", "path": "/srv/a"}}},
        "default_sampling_params.lora.path",
        "--model-root /srv/a",
    ),
]


@pytest.mark.attack("A3")
@pytest.mark.attack("N2")
@pytest.mark.parametrize(("stage", "key", "flag"), CLOSED)
def test_whatever_can_bring_code_is_closed_and_its_flag_opens_it(stage: dict[str, Any], key: str, flag: str) -> None:
    refusal = told(stage)
    assert refusal.startswith("stage 0: the pipeline in etcd asks for what this host has not allowed: ")
    assert key in refusal
    assert flag in refusal
    words = shlex.split(refusal.partition("allow it here: ")[2])
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    roots = [word for word in words if words[words.index(word) - 1] == "--model-root"]
    allow = [word for word in words if words[words.index(word) - 1] == "--allow"]
    assert pairs.keys() <= {"--allow", "--model-root"}
    assert told(stage, Bounds(allow=read_allow(allow), model_roots=(*HOST.model_roots, *roots))) == ""
    assert told(stage, Bounds(allow=("all",))) == ""


@pytest.mark.attack("A3")
def test_another_packages_connector_and_folders_of_hand_offs_are_closed() -> None:
    two = [{"stage_id": 0, "engine": "echo"}, {"stage_id": 1, "engine": "echo", "final_output": "text"}]
    connectors = {"mine": {"name": "Theirs", "extra": {"directory": "/etc"}}, "ours": {"name": "SharedMemoryConnector"}}
    edges = [{"from": 0, "to": 1, "connector": "mine"}]
    content = {"stages": two, "connectors": connectors, "edges": edges}
    deploy = decode_deploy(msgspec.json.encode(content), "etcd")
    assert [each.flag for each in closed_in(deploy, 0, HOST, locate)] == ["--allow connector=Theirs"]
    connectors["mine"]["name"] = "SharedMemoryConnector"
    deploy = decode_deploy(msgspec.json.encode(content), "etcd")
    assert [each.flag for each in closed_in(deploy, 1, HOST, locate)] == ["--allow key=connectors.directory"]
    assert list(closed_in(deploy, 1, Bounds(allow=("key=connectors.directory",)), locate)) == []


def test_every_key_of_a_document_has_a_rule() -> None:
    """A key that is added to the document has to be judged: closed until then, and this test says so."""
    for kind, keys in JUDGED.items():
        assert {field.name for field in msgspec.structs.fields(kind)} == keys, kind


@pytest.mark.attack("A3")
def test_a_key_without_a_rule_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(JUDGED, StageConfig, JUDGED[StageConfig] - {"input_from"})  # type: ignore[arg-type]
    assert "input_from has no bounds yet" in told({"engine": "echo", "input_from": []})
    assert told({"engine": "echo", "input_from": []}, Bounds(allow=("key=input_from",))) == ""
    assert told({"engine": "echo"}) == ""


@pytest.mark.attack("A3")
def test_a_value_of_many_levels_is_refused_like_any_other() -> None:
    content = '{"stages": [{"stage_id": 0, "engine": "%s", "final_output": "text", "engine_args": {"%s": %s}}]}'
    levels = "[" * 50 + '{"a": "x y"}' + "]" * 50
    for engine, name in (("vllm", "dtype"), ("echo", "fail_on"), ("vllm", "of_a_later_vllm")):
        deploy = decode_deploy((content % (engine, name, levels)).encode(), "etcd")
        with pytest.raises(ConfigError, match="has not allowed"):
            check_document(deploy, 0, HOST, locate)


def test_only_the_stage_that_runs_here_is_judged() -> None:
    stages = [{"stage_id": 0, **TORCH}, {"stage_id": 1, "engine": "echo", "final_output": "text"}]
    deploy = decode_deploy(msgspec.json.encode({"stages": stages}), "etcd")
    check_document(deploy, 1, HOST, locate)
    with pytest.raises(ConfigError, match="target"):
        check_document(deploy, 0, HOST, locate)


def test_several_refusals_are_told_at_once_and_nothing_of_them_moves_a_terminal() -> None:
    refusal = told(vllm("\x1b[2J/evil", trust_remote_code=True, hf_token="\n"))
    assert refusal.count("--allow") == 3
    assert refusal.isprintable()


def test_vllm_reads_safetensors_only_unless_pickled_weights_are_allowed() -> None:
    stage = StageConfig(stage_id=0, engine="vllm", model="m", engine_args={"max_num_seqs": 1})
    assert within(stage, HOST).engine_args == {"max_num_seqs": 1, "load_format": "safetensors"}
    assert within(stage, Bounds(allow=("pickled-weights",))) is stage
    dummy = StageConfig(stage_id=0, engine="vllm", model="m", engine_args={"load_format": "dummy"})
    assert within(dummy, HOST) is dummy
    echo = StageConfig(stage_id=0, engine="echo")
    assert within(echo, HOST) is echo
