"""Which release of vLLM-Omni's server is put in front of a hub."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from hub.api.vllm.omni.versions import TESTED, check_server_version
from omni_discovery.errors import ConfigError


def test_only_the_tested_release_is_served_and_the_pip_line_says_which() -> None:
    check_server_version(lambda _: TESTED)
    for found in ("0.29.0", "0.30.1", "0.30.0rc1", "0.31.0"):
        with pytest.raises(ConfigError, match=rf"{found} is here: pip install 'vllm-omni==0\.30\.0'"):
            check_server_version(lambda _, found=found: found)  # type: ignore[misc]


def test_without_it_the_pip_line_is_said() -> None:
    def find(_: str) -> str:
        raise PackageNotFoundError

    with pytest.raises(ConfigError, match=r"in this hub's own Python: pip install 'vllm-omni==0\.30\.0'"):
        check_server_version(find)
