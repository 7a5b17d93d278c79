"""Every flag of vLLM-Omni is understood or answered."""

from __future__ import annotations

import argparse
import shlex

import pytest

from hub.command import ServeCommand
from hub.serve.flags import check_flags
from hub.serve.vllm_omni import flags as vllm_omni_flags
from omni_discovery.errors import ConfigError

#: Those of its release 0.30.0 that do something here.
UNDERSTOOD = shlex.split("""
--omni --model --deploy-config --stage-configs-path --stage-overrides --async-chunk --no-async-chunk --stage-id
--replica-id --stage-init-timeout --init-timeout --shm-threshold-bytes --log-stats --worker-backend --ray-address
--omni-master-address -oma --omni-master-port -omp --omni-replica-address -ora --omni-dp-size-local --omni-lb-policy
--omni-heartbeat-timeout --default-sampling-params --headless --enable-sleep-mode --api-server-count
""")
#: The others.
ANSWERED = shlex.split("""
--task-type --forced-aligner --forced-aligner-config --forced-aligner-device --strategy-config --log-file
--batch-timeout --num-gpus --model-class-name --diffusion-load-format --lora-path --lora-backend --lora-scale
--diffusion-compile-granularity --diffusion-compile-dynamic --fa-deterministic --diffusers-load-kwargs
--diffusers-call-kwargs --custom-pipeline-args --usp --ulysses-degree --ulysses-mode --ulysses-a2a-permute --ring
--ring-degree --allgather-degree --diffusion-quantization-config --force-cutlass-fp8 --use-hsdp --hsdp-shard-size
--hsdp-replicate-size --diffusion-attention-backend --fastvideo-vsa-topk --diffusion-attention-config --cache-backend
--cache-config --video-output-transport --enable-cache-dit-summary --step-execution --request-batch-max-wait-ms
--vae-use-slicing --vae-use-tiling --vae-fast-path --disable-multithread-weight-load --enable-broadcast-weight-load
--num-weight-load-threads --diffusion-offload-config --enable-cpu-offload --enable-layerwise-offload
--enable-distributed-layerwise-offload --dlo-use-allgather --dlo-no-use-allgather --dlo-resident-layers
--host-weight-runtime-mode --host-weight-runtime-root --dlo-host-registration-limit-gib --boundary-ratio --flow-shift
--diffusion-kv-cache-dtype --diffusion-kv-cache-skip-steps --diffusion-kv-cache-skip-layers --cfg-parallel-size
--vae-patch-parallel-size --text-encoder-tp-size --vae-parallel-mode --max-generated-image-size
--diffusion-streaming-output --tts-max-instructions-length --no-guardrails --robot-openpi-idle-timeout
--enable-diffusion-pipeline-profiler --enable-ar-profiler --enable-orch-monitor --auxiliary-text-encoder
--device-ids
""")
#: No flag of any release, but the argument of its clients that etcd's endpoints replace.
ARGUMENT = "--coord-zmq-addr"


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    return parser


@pytest.mark.parametrize("flag", UNDERSTOOD)
def test_a_flag_that_means_something_here_is_ours(parser: argparse.ArgumentParser, flag: str) -> None:
    assert flag in parser._option_string_actions
    assert flag not in vllm_omni_flags.VALUES | vllm_omni_flags.LISTS | vllm_omni_flags.SWITCHES


@pytest.mark.parametrize("flag", ANSWERED)
def test_a_flag_without_a_meaning_is_answered_with_what_to_do(parser: argparse.ArgumentParser, flag: str) -> None:
    value = [] if flag in vllm_omni_flags.SWITCHES else ["1"]
    with pytest.raises(ConfigError) as refused:
        check_flags(parser.parse_args([flag, *value, "--model", "m"]))
    said = str(refused.value)
    assert said.startswith(f"{flag}: ")
    assert len(said) > len(flag) + 30


def test_no_flag_is_answered_that_nobody_knows() -> None:
    answered = {*vllm_omni_flags.VALUES, *vllm_omni_flags.LISTS, *vllm_omni_flags.SWITCHES}
    off = {"--no-ulysses-a2a-permute", "--no-diffusion-compile-dynamic"}
    assert answered == {*ANSWERED, *off, ARGUMENT}


@pytest.mark.parametrize("flag", [ARGUMENT, "--coord_zmq_addr"])
def test_a_coordinators_address_is_answered_with_etcds_endpoints(parser: argparse.ArgumentParser, flag: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no coordinator here.*--etcd-endpoints HOST:PORT"):
        check_flags(parser.parse_args([flag, "h:1", "--model", "m"]))
