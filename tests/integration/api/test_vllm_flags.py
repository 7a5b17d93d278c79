"""The committed names of vLLM's flags are those of the installed vLLM."""

from __future__ import annotations

from argparse import Action
from typing import Any

import pytest

from hub.serve import vllm_flags
from omni_discovery.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

#: Ours, or answered by ``hub.serve.vllm_omni.flags``.
NOT_ENGINES = {"help", "device_ids"}
NOT_SERVERS = {"host", "port", "headless", "config", "api_server_count"}


def engine_actions() -> list[Action]:
    """The flags of vLLM's engine."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    actions: list[Action] = parser._actions
    return actions


def server_actions() -> list[Action]:
    """All flags of ``vllm serve``."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())  # type: ignore[no-untyped-call, unused-ignore]
    actions: list[Action] = parser._actions
    return actions


def converted(action: Action, text: str) -> Any:
    """What vLLM makes of a value; None if it is none."""
    try:
        return action.type(text) if callable(action.type) else text
    except Exception:  # noqa: BLE001 - each type raises what it likes
        return None


def kind_of(action: Action) -> frozenset[str]:
    """The list in which a flag has to be."""
    if action.nargs == 0:
        return vllm_flags.SWITCHES
    is_text = isinstance(converted(action, "12"), str) and isinstance(converted(action, "{}"), str)
    if action.nargs == "+":
        return vllm_flags.TEXT_LISTS if is_text else vllm_flags.VALUE_LISTS
    return vllm_flags.TEXTS if is_text else vllm_flags.VALUES


def test_every_flag_of_the_engine_is_known_with_what_it_takes() -> None:
    from vllm.engine.arg_utils import EngineArgs

    theirs = {action.dest: action for action in engine_actions() if action.dest not in NOT_ENGINES}
    lists = (vllm_flags.SWITCHES, vllm_flags.TEXTS, vllm_flags.VALUES, vllm_flags.TEXT_LISTS, vllm_flags.VALUE_LISTS)
    assert theirs.keys() == frozenset[str]().union(*lists)
    assert [name for name, action in theirs.items() if name not in kind_of(action)] == []
    assert [name for name, action in theirs.items() if f"--{name.replace('_', '-')}" not in action.option_strings] == []
    assert theirs.keys() <= EngineArgs.__dataclass_fields__.keys()
    aliases = {option: action.dest for action in theirs.values() for option in action.option_strings}
    ours = {alias: name for alias, name in vllm_flags.ALIASES.items() if name in theirs}
    assert ours.items() <= aliases.items()


def test_every_flag_of_the_server_is_known_with_what_it_takes() -> None:
    known = {action.dest for action in engine_actions()} | NOT_SERVERS
    kinds: dict[object, set[str]] = {0: set(), None: set(), "+": set()}
    for action in server_actions():
        if action.option_strings and action.dest not in known:
            kinds[action.nargs].add(action.dest)
    assert kinds == {
        0: vllm_flags.SERVER_SWITCHES,
        None: vllm_flags.SERVER_VALUES,
        "+": vllm_flags.SERVER_LISTS,
    }


def test_flags_that_api_args_refuses_are_not_recommended_for_it() -> None:
    from hub.api.vllm.flags import _NOT_HERE, _NOT_HERE_PREFIXES, _OF_THE_HUB

    server = vllm_flags.SERVER_SWITCHES | vllm_flags.SERVER_VALUES | vllm_flags.SERVER_LISTS
    refused = {name for name in server if name in _NOT_HERE or name.startswith(_NOT_HERE_PREFIXES)}
    assert refused == vllm_flags.WITHOUT_EFFECT
    assert _OF_THE_HUB.keys() == vllm_flags.OF_THE_HUB


@pytest.mark.attack("A30")
def test_which_pages_may_send_requests_is_told_to_omni_serve_and_not_to_vllm() -> None:
    """There would be two answers otherwise: the hub's own, and that of the server behind it."""
    from hub.api.vllm.flags import parse_flags

    with pytest.raises(ConfigError, match="--allowed-origins is a flag of omni serve for every API"):
        parse_flags("""--allowed-origins '["https://a.example"]'""")
    with pytest.raises(ConfigError, match="--allow-credentials has no effect on a hub"):
        parse_flags("--allow-credentials")
    # As of releases whose server lets all pages in by itself.
    assert parse_flags("").allowed_origins == []
