"""``omni completion``: prints what a shell needs to complete the commands, flags and choices of ``omni``.

The script is made once and holds all of it, so that a shell starts nothing when TAB is pressed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from omni_discovery.commands.main import OmniParser

#: Shells, and where each finds the script of a user; zsh's folder has to be one of its ``fpath``.
SHELLS: Final = {
    "bash": "~/.local/share/bash-completion/completions/omni",
    "zsh": "~/.zfunc/_omni",
    "fish": "~/.config/fish/completions/omni.fish",
}
#: Values that are files or folders, by how the help calls them.
_FILES: Final = frozenset(("FILE", "PATH", "YAML"))
_FOLDERS: Final = frozenset(("DIR", "FOLDER"))


class CompletionCommand:
    """``omni completion bash|zsh|fish``."""

    summary = "print the script by which bash, zsh or fish completes omni's commands and flags"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        parser.add_argument("shell", choices=list(SHELLS), help="the shell")
        lines = [f"  omni completion {shell} > {place}" for shell, place in SHELLS.items()]
        parser.epilog = "\n".join(["to install it, and again after an upgrade:", *lines])
        parser.formatter_class = argparse.RawDescriptionHelpFormatter

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        from omni_discovery.commands.main import whole_parser

        sys.stdout.write(script_of(whole_parser(), arguments.shell))
        return 0


def script_of(parser: OmniParser, shell: str) -> str:
    """The script for a shell. Raise ConfigError if the library that writes it is missing."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("completion is written by shtab, which is not installed: pip install shtab") from error
    for action in _actions_of(parser):
        if isinstance(action.choices, dict) and not isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            # A mapping would be taken for sub-commands.
            action.choices = list(action.choices)
        word = str(action.metavar or action.dest).upper()
        if word in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.type is Path or word in _FILES or word.endswith("_FILE"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell).rstrip() + "\n"


def _actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a command and of all below it."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask for them
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for each in action.choices.values():
                yield from _actions_of(each)
