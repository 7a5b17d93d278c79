"""Which stages may run the code that came with their model; integration/replica/test_model_code shows that it runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_discovery.deploy.document import DeployConfig, parse_deploy
from omni_discovery.deploy.trust.bounds import Bounds
from omni_discovery.deploy.trust.model_code import may_run_model_code


def document(engine: str, **engine_args: Any) -> DeployConfig:
    stage = {"stage_id": 0, "engine": engine, "model": "m", "engine_args": engine_args, "final_output": "text"}
    return parse_deploy(json.dumps({"stages": [stage]}), "file")


TRUSTING = {"trust_remote_code": True}


@pytest.mark.parametrize(
    ("deploy", "allow", "is_own", "may"),
    [
        (document("vllm-omni"), (), False, False),
        (document("vllm-omni"), (), True, False),
        (document("vllm-omni"), ("remote-code",), False, False),
        (document("vllm-omni", **TRUSTING), ("remote-code",), False, True),
        (document("vllm-omni", **TRUSTING), ("all",), False, True),
        (document("vllm", **TRUSTING), ("engine-arg=trust_remote_code",), False, True),
        (document("vllm", **TRUSTING), (), True, True),
        (document("vllm", **TRUSTING), (), False, False),
        (document("torch", target="m:f"), ("target=m",), False, False),
        (document("torch", target="m:f"), ("target=m", "remote-code"), False, True),
        (document("torch", target="m:f"), (), True, True),
        (document("diffusion"), ("all",), True, False),
    ],
)
def test_who_may_run_a_models_code(deploy: DeployConfig, allow: tuple[str, ...], is_own: bool, may: bool) -> None:
    bounds = Bounds(allow=allow)
    assert may_run_model_code(deploy, 0, bounds.owning(deploy) if is_own else bounds) is may
