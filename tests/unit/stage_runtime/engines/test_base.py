"""Engines by name: what is told of one that is not known, and what is imported for one before a fork."""

from __future__ import annotations

import pytest

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from stage_runtime.engines.base import create_engine, modules_to_preload


@pytest.mark.parametrize("engine", ["echo", "torch", "mine"])
def test_nothing_is_preloaded_for_an_engine_without_heavy_modules_or_of_a_third_party(engine: str) -> None:
    assert modules_to_preload(engine) == ()


def test_the_error_for_an_unknown_engine_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'ehco' is not known; there are: diffusion, echo, .*torch, vllm"):
        create_engine(StageConfig(stage_id=0, engine="ehco"))
