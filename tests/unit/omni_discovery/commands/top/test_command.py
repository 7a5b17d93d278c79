"""``omni top`` where it can't show a screen."""

from __future__ import annotations

import argparse
import builtins
import sys
from typing import Any

import pytest

from omni_discovery.commands.top.command import TopCommand
from omni_discovery.errors import ConfigError


def test_without_a_terminal_the_error_names_what_prints_text() -> None:
    with pytest.raises(ConfigError, match=r"omni status .* omni replicas --watch"):
        TopCommand().run(argparse.Namespace())


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def importing(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "textual":
            raise ImportError(name)
        return real(name, *arguments, **options)

    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(ConfigError, match=r"pip install 'omni-discovery\[top\]'"):
        TopCommand().run(argparse.Namespace())
