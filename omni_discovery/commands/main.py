"""The ``omni`` command: finds its sub-commands and runs one. They are entry points of ``omni_discovery.commands``.

Only the sub-command on the command line is imported; ``omni --help`` imports all of them for their summaries, so their
modules import at the top what a summary and the flags need, and the rest in ``run``.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import NoReturn, Protocol

from omni_discovery import __version__
from omni_discovery.errors import ConfigError, OmniError
from omni_discovery.plugins import COMMAND_GROUPS, find_plugins, find_shadow

#: Our packages with generic names, which a file or folder of a user may hide.
_OURS = ("hub", "stage_runtime")


class Command(Protocol):
    """One sub-command; its entry point names a class or function that returns one.

    ``summary`` is its line in ``omni --help``. It may have an ``unknown_flag_hint``, added to the error about a flag
    that resembles none of its own.
    """

    summary: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return its exit code.

        ConfigError ends as one line on standard error and exit code 2, any other OmniError as one and exit code 1.
        """


def main(argv: list[str] | None = None) -> int:
    """Run ``omni`` with these arguments (None: the process's); return the exit code.

    0: done, 1: failed, 2: used wrongly, 130: interrupted.
    """
    words = sys.argv[1:] if argv is None else argv
    parser, subparsers = _empty_parser()
    installed = dict(sorted(find_plugins(COMMAND_GROUPS).items()))
    chosen = next((word for word in words if not word.startswith("-")), "")
    if chosen in installed:
        command = _load(installed[chosen])
        if command is None:
            return 2
        command.add_arguments(_add_parser(subparsers, chosen, command))
    else:
        for name, entry in installed.items():
            if (command := _load(entry)) is not None:
                _add_parser(subparsers, name, command)
        if chosen:
            near = difflib.get_close_matches(chosen, installed, n=1)
            meant = f"did you mean omni {near[0]}?" if near else f"there are: {', '.join(installed)}"
            return _print_error(ConfigError(f"{chosen!r} is no command of omni; {meant}"), 2)
    try:
        arguments, unknown = parser.parse_known_args(words)
    except _UsageError as error:
        unknown = _unknown_flags(words, subparsers.choices[chosen]) if chosen else []
        told = [_explain_word(word, chosen, subparsers.choices[chosen], command) for word in unknown]
        return _print_error(ConfigError(_BREAK.join([*told, str(error)])), 2)
    if unknown:
        return _print_error(_unknown_words(unknown, arguments.command, subparsers.choices), 2)
    return _run(arguments)


def whole_parser() -> OmniParser:
    """``omni`` with all of its commands and their flags, as they are installed."""
    parser, subparsers = _empty_parser()
    for name, entry in sorted(find_plugins(COMMAND_GROUPS).items()):
        if (command := _load(entry)) is not None:
            command.add_arguments(_add_parser(subparsers, name, command))
    return parser


def _empty_parser() -> tuple[OmniParser, argparse._SubParsersAction[OmniParser]]:
    parser = OmniParser(prog="omni", description="Serve multi-stage models on many hosts, without a head.")
    parser.add_argument("--version", action="version", version=f"omni {__version__}")
    return parser, parser.add_subparsers(metavar="COMMAND", required=True)


class _UsageError(ConfigError):
    """The arguments are not those that the parser takes."""


class OmniParser(argparse.ArgumentParser):
    """Raises _UsageError in place of printing all flags: the error would stand below a screen of them."""

    def error(self, message: str) -> NoReturn:
        """See ArgumentParser."""
        raise _UsageError(f"{message} (see {self.prog} --help)")


#: Between two errors of one command line.
_BREAK = "\n      "
#: How much alike a wrong flag and the one that may be meant must be.
_ALIKE = 0.75


def _unknown_words(
    words: Sequence[str], command: Command, parsers: Mapping[str, argparse.ArgumentParser]
) -> ConfigError:
    """Name the words that a command does not know, with the flags that they may have been meant to be."""
    name = next(name for name, parser in parsers.items() if parser.get_default("command") is command)
    told: list[str] = []
    for word in words:
        if word.startswith("-"):
            told.append(_explain_word(word, name, parsers[name], command))
        elif not told:
            told.append(f"{word!r} is no argument of omni {name}")
    return ConfigError(_BREAK.join(told) + f" (see omni {name} --help)")


def _explain_word(word: str, name: str, parser: argparse.ArgumentParser, command: Command | None) -> str:
    """Say that a command has no such flag, and which may be meant."""
    flag, known = word.partition("=")[0], sorted(_flags_of(parser))
    begun = [each for each in known if each.startswith(flag)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(flag, known, n=1, cutoff=_ALIKE)
    meant = f"; did you mean {near[0]}?" if near else getattr(command, "unknown_flag_hint", "")
    return f"{flag} is no flag of omni {name}{meant}"


def _unknown_flags(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The words that look like flags and are none: argparse names them only where all else is right."""
    known = _flags_of(parser)
    given = [word for word in words[: words.index("--") if "--" in words else None] if word.startswith("--")]
    begins = tuple(known) if parser.allow_abbrev else ()
    flags = {word: word.partition("=")[0] for word in given}
    return [
        word for word, flag in flags.items() if flag not in known and not any(each.startswith(flag) for each in begins)
    ]


def _flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """All flags of a command, those of its actions too."""
    flags = set(parser._option_string_actions)  # noqa: SLF001 - argparse has no other way to ask for them
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            flags |= {flag for each in action.choices.values() for flag in _flags_of(each)}
    return flags


def _load(entry: EntryPoint) -> Command | None:
    """Import a sub-command; None, with a line on standard error, if that fails."""
    package = entry.value.partition(":")[0].partition(".")[0]
    if package in _OURS and (shadow := find_shadow(package)) is not None:
        sys.stderr.write(
            f"omni: the command {entry.name!r} can't be loaded: {shadow} hides omni-discovery's package {package!r}: "
            "rename it, or start from another folder\n"
        )
        return None
    try:
        command: Command = entry.load()()
    except Exception as error:  # noqa: BLE001 - one broken third-party command must not take the others away
        sys.stderr.write(f"omni: the command {entry.name!r} can't be loaded: {error}\n")
        return None
    return command


def _add_parser(
    subparsers: argparse._SubParsersAction[OmniParser], name: str, command: Command
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=command.summary, description=command.summary)
    parser.set_defaults(command=command)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    try:
        if folders := os.environ.get("OMNI_TRUSTED_FOLDERS"):
            # Few commands need what this imports.
            from omni_discovery.processes import trust_folders

            trust_folders(folders)
        code = int(arguments.command.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the pipe has closed it; the interpreter must not try to write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as error:
        return _print_error(error, 2)
    except OmniError as error:
        return _print_error(error, 1)
    except KeyboardInterrupt:
        return 130


def _print_error(error: OmniError, code: int) -> int:
    from omni_discovery.commands.output import say

    say(str(error), error=True)
    return code
