"""The flags of vLLM-Omni's ``omni serve`` that have no meaning here, each with what to do in its place. Pure."""

from __future__ import annotations

from typing import Final

_DIFFUSION: Final = (
    "diffusion stages run pipelines of diffusers here, whose settings are in engine_args of the stage"
    " (docs/engines.md#pipelines-of-diffusers-engine-diffusion)"
)
_PARALLEL: Final = f"a replica of a diffusion stage is one device here: run more replicas; {_DIFFUSION}"
_OFFLOAD: Final = f"nothing is offloaded here: give the stage a larger device, or leave_out components; {_DIFFUSION}"
_MODEL_CODE: Final = "vLLM-Omni's own model code reads it, and no engine here has a use for it"
_PROFILE: Final = (
    "the times of each stage are in /metrics and, with --otlp-traces-endpoint, in spans; for profiles of an engine:"
    " docs/operations/run.md#profiles-adapters-and-sleep"
)

#: Flags that take a value, with the answer.
VALUES: Final = {
    "--coord-zmq-addr": (
        "there is no coordinator here, etcd is in its place: give every hub and replica --etcd-endpoints HOST:PORT"
        " instead, or set OMNI_ETCD_ENDPOINTS"
    ),
    "--strategy-config": "there are no strategy files: write the parallel sizes into engine_args of each stage",
    "--log-file": "logs go to standard error: redirect it (2>> FILE), or let journald or the container keep it",
    "--batch-timeout": "engines batch what waits, without a pause: max_num_seqs or capacity in engine_args bounds it",
    "--num-gpus": 'name the devices: runtime: {devices: "0,1"} of the stage',
    "--device-ids": 'name the devices: runtime: {devices: "0,1"} of the stage',
    "--flow-shift": _MODEL_CODE,
    "--boundary-ratio": _MODEL_CODE,
    "--max-generated-image-size": "engine_args.max_side_px of the diffusion stage bounds each side",
    "--request-batch-max-wait-ms": "pictures are drawn together as they wait, without a pause: engine_args.capacity",
    "--diffusers-call-kwargs": "write engine_args.call_args of the diffusion stage",
    "--diffusers-load-kwargs": "engine_args of the diffusion stage has dtype, revision, allow_download and leave_out",
    **dict.fromkeys(
        (
            *("--task-type", "--forced-aligner", "--forced-aligner-config", "--forced-aligner-device"),
            *("--tts-max-instructions-length", "--robot-openpi-idle-timeout", "--auxiliary-text-encoder"),
            *("--model-class-name", "--custom-pipeline-args", "--video-output-transport"),
        ),
        _MODEL_CODE,
    ),
    **dict.fromkeys(
        (
            *("--usp", "--ulysses-degree", "--ulysses-mode", "--ring", "--ring-degree", "--allgather-degree"),
            *("--hsdp-shard-size", "--hsdp-replicate-size", "--cfg-parallel-size", "--vae-patch-parallel-size"),
            *("--text-encoder-tp-size", "--vae-parallel-mode"),
        ),
        _PARALLEL,
    ),
    **dict.fromkeys(
        (
            *("--diffusion-offload-config", "--dlo-resident-layers", "--dlo-host-registration-limit-gib"),
            *("--host-weight-runtime-mode", "--host-weight-runtime-root"),
        ),
        _OFFLOAD,
    ),
    **dict.fromkeys(
        (
            *("--diffusion-load-format", "--lora-backend", "--lora-scale", "--diffusion-compile-granularity"),
            *("--diffusion-quantization-config", "--diffusion-attention-backend", "--fastvideo-vsa-topk"),
            *("--diffusion-attention-config", "--cache-backend", "--cache-config", "--vae-fast-path"),
            *("--num-weight-load-threads", "--diffusion-kv-cache-dtype", "--diffusion-kv-cache-skip-steps"),
            "--diffusion-kv-cache-skip-layers",
        ),
        _DIFFUSION,
    ),
}
#: Flags that take several values, with the answer.
LISTS: Final = {"--lora-path": _DIFFUSION}
#: Flags that take nothing, with the answer.
SWITCHES: Final = {
    "--step-execution": "an abort always ends a pipeline at its next step: leave it out",
    "--fa-deterministic": _DIFFUSION,
    "--diffusion-streaming-output": _DIFFUSION,
    **dict.fromkeys(
        ("--enable-diffusion-pipeline-profiler", "--enable-ar-profiler", "--enable-orch-monitor"),
        _PROFILE,
    ),
    "--no-guardrails": _MODEL_CODE,
    **dict.fromkeys(("--use-hsdp", "--ulysses-a2a-permute", "--no-ulysses-a2a-permute"), _PARALLEL),
    **dict.fromkeys(
        (
            *("--enable-cpu-offload", "--enable-layerwise-offload", "--enable-distributed-layerwise-offload"),
            *("--dlo-use-allgather", "--dlo-no-use-allgather"),
        ),
        _OFFLOAD,
    ),
    **dict.fromkeys(
        (
            *("--diffusion-compile-dynamic", "--no-diffusion-compile-dynamic", "--force-cutlass-fp8"),
            *("--enable-cache-dit-summary", "--vae-use-slicing", "--vae-use-tiling"),
            *("--disable-multithread-weight-load", "--enable-broadcast-weight-load"),
        ),
        _DIFFUSION,
    ),
}
