"""``omni why``: asks hubs for receipts, and prints what they tell."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

from omni_discovery.commands.registry import (
    add_registry_options,
    operators_token,
    read_hub_records,
    user_runtime_dir,
    with_registry,
)
from omni_discovery.errors import ConfigError, OmniError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_discovery.kv import KVStore
    from omni_discovery.receipts.receipt import Receipt

    #: Asks one hub for a path.
    Ask = Callable[[str], dict[str, Any]]

_T = TypeVar("_T")

_REPLICA: Final = re.compile(r"(\d{1,9})/(\d{1,9})")
#: Exit codes of ``--replay`` beside 0: another choice, and an input that the receipt has not.
_OTHER_CHOICE: Final = 1
_LACKS_INPUT: Final = 3
_MOST_LISTED: Final = 1000
_URL_SHOWN: Final = 200
#: Columns of an output that is no terminal.
_WIDTH: Final = 80


class WhyCommand:
    """``omni why REQUEST``, ``omni why STAGE/REPLICA``, ``omni why --last-failures`` and ``omni why --waiting``."""

    summary = "show why a request went where it went, what it waits for, or why a replica gets nothing"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        parser.add_argument(
            "what",
            nargs="?",
            metavar="WHAT",
            help="a request: the id of its answer (chatcmpl-...), x-omni-request-id or the x-request-id of its client;"
            " or a replica, e.g. 1/2",
        )
        parser.add_argument("--last-failures", action="store_true", help="the requests that failed last")
        parser.add_argument("--waiting", action="store_true", help="the requests that wait now, and what for")
        parser.add_argument(
            "--replay",
            action="store_true",
            help="have the shipped policy make each pick again; the exit code is 0 if it chooses the same, 1 if not, 3"
            " if the receipt lacks an input",
        )
        parser.add_argument("--limit", type=_limit, default=20, metavar="N", help="the newest N (default: %(default)s)")
        parser.add_argument("--json", action="store_true", help="print JSON lines instead, with all fields")
        add_hub_options(parser)
        add_registry_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        _check(arguments)
        asks = _hubs(arguments)
        if arguments.waiting:
            return _show_waiting(asks, arguments)
        if arguments.last_failures:
            return _show_failures(asks, arguments)
        replica = _REPLICA.fullmatch(arguments.what)
        if replica is not None:
            return _show_replica(asks, replica[1], replica[2], arguments)
        return _show_request(asks, arguments)


def add_hub_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which hubs to ask."""
    hubs = parser.add_argument_group("which hubs to ask (default: all of yours on this machine, without a token)")
    hubs.add_argument(
        "--hub",
        action="append",
        default=[],
        metavar="URL",
        help="this one, by its --admin-port: http://HOST:PORT; may be repeated",
    )
    hubs.add_argument(
        "--all-hubs",
        action="store_true",
        help="also those elsewhere that etcd has with an --admin-port",
    )
    hubs.add_argument("--admin-token-file", metavar="FILE", help="their token (default: $OMNI_ADMIN_TOKEN)")
    hubs.add_argument("--admin-ca-file", metavar="FILE", help="who signed their certificates (default: the system's)")
    hubs.add_argument(
        "--admin-token-anywhere",
        action="store_true",
        help="with --all-hubs: send the token to every address that etcd has, not only to this machine and to https://"
        " proved by --admin-ca-file; whoever may write hubs' records gets it",
    )


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MOST_LISTED):
        raise argparse.ArgumentTypeError(f"{text!r} is none; right would be 1 to {_MOST_LISTED}")
    return int(text)


def _check(arguments: argparse.Namespace) -> None:
    chosen = [bool(arguments.what), arguments.last_failures, arguments.waiting]
    if sum(chosen) != 1:
        raise ConfigError(
            "say what: omni why REQUEST, omni why STAGE/REPLICA, --last-failures or --waiting (one of them)"
        )
    if arguments.replay and (not arguments.what or _REPLICA.fullmatch(arguments.what)):
        raise ConfigError("--replay is of one request: omni why REQUEST --replay")


# ---- whom to ask


def _hubs(arguments: argparse.Namespace) -> list[Ask]:
    """The hubs to ask. Raise ConfigError if there are none."""
    urls: list[str] = []
    if arguments.all_hubs and not arguments.hub:
        with_registry(arguments, lambda kv: _admin_urls(kv, arguments.namespace, urls))
    asks = hubs_to_ask(arguments, urls)
    if not asks:
        raise ConfigError(
            f"no hub of namespace {arguments.namespace!r} runs here under this user: give --namespace, or name a hub"
            " elsewhere by its --admin-port with --hub http://HOST:PORT (omni hubs shows who there is)"
        )
    return asks


def hubs_to_ask(arguments: argparse.Namespace, urls: Sequence[str]) -> list[Ask]:
    """Those that ``--hub`` names, else those of this user on this machine and at ``urls``. Raise ConfigError."""
    from functools import partial

    from omni_discovery.receipts.asking import HubUnaskableError, ask_process, ask_url, is_proved, local_hubs

    token, ca_file = _token(arguments), arguments.admin_ca_file or ""

    def by_url(url: str) -> Ask:
        return lambda path: ask_url(url, path, token, ca_file)

    def by_record(url: str) -> Ask:
        def ask(path: str) -> dict[str, Any]:
            if token and not arguments.admin_token_anywhere and not is_proved(url, ca_file):
                raise HubUnaskableError(
                    f"the hub at {url[:_URL_SHOWN]} is not asked: etcd alone says that it is one, and it would get the"
                    " token. Give --admin-ca-file where it has https://, name it by --hub, or let the token go to all"
                    " addresses in etcd by --admin-token-anywhere"
                )
            try:
                return ask_url(url, path, token, ca_file)
            except ConfigError as error:
                # One record that is wrong must not keep the other hubs from being asked.
                raise HubUnaskableError(f"a hub's record can't be used: {error}") from error

        return ask

    if arguments.hub:
        return [by_url(url) for url in arguments.hub]
    folder, namespace = user_runtime_dir(), arguments.namespace
    asks: list[Ask] = [partial(ask_process, folder, namespace, pid) for pid in local_hubs(folder, namespace)]
    return asks + [by_record(url) for url in urls]


def _token(arguments: argparse.Namespace) -> str:
    from pathlib import Path

    if not arguments.admin_token_file:
        return operators_token()
    try:
        return Path(arguments.admin_token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-token-file {arguments.admin_token_file} can't be read: {error}") from error


async def _admin_urls(kv: KVStore, namespace: str, urls: list[str]) -> int:
    """Append the URLs that hubs have registered for operators."""
    import msgspec

    records = await read_hub_records(kv, namespace)
    urls += [record.admin for record in records if record.admin is not msgspec.UNSET and record.admin]
    return 0


def ask_all(asks: Sequence[Ask], path: str) -> list[dict[str, Any]]:
    """The answers of the hubs that have one, one of each hub. Raise OmniError if none has."""
    from omni_discovery.commands.output import say
    from omni_discovery.receipts.asking import HubUnaskableError, NoReceiptError

    answers: dict[str, dict[str, Any]] = {}
    unasked: list[OmniError] = []
    missing: list[OmniError] = []
    for ask in asks:
        try:
            answer = ask(path)
        except HubUnaskableError as error:
            unasked.append(error)
        except NoReceiptError as error:
            missing.append(error)
        else:
            answers[str(answer.get("hub", len(answers)))] = answer
    if not answers:
        raise (missing or unasked)[0]
    for each in unasked:
        say(str(each), error=True)
    return [*answers.values()]


def _all_of(answers: Sequence[dict[str, Any]], name: str, kind: type[_T]) -> list[_T]:
    """The parts of this name of all answers. Raise OmniError for what is no such part."""
    import msgspec

    try:
        return [msgspec.convert(each, kind) for answer in answers for each in answer.get(name, [])]
    except (msgspec.ValidationError, TypeError) as error:
        raise OmniError(f"a hub's answer can't be read, it may be of another release: {error}") from error


# ---- what to show


def _print(lines: Sequence[str]) -> None:
    from omni_discovery.commands.output import say

    for line in lines:
        say(line)


def _width() -> int:
    import shutil

    return max(60, shutil.get_terminal_size((_WIDTH, 24)).columns)


def _show_request(asks: Sequence[Ask], arguments: argparse.Namespace) -> int:
    from omni_discovery.commands.terminal import print_json
    from omni_discovery.commands.why.waterfall import waterfall
    from omni_discovery.receipts.asking import path_of
    from omni_discovery.receipts.receipt import Receipt

    receipts = _all_of(ask_all(asks, path_of("requests", arguments.what)), "receipts", Receipt)
    if arguments.replay:
        return _replay(receipts, arguments)
    for number, receipt in enumerate(receipts):
        if arguments.json:
            print_json(receipt)
        else:
            _print([""] if number else [])
            _print(waterfall(receipt, _width()))
    return 0


def _replay(receipts: Sequence[Receipt], arguments: argparse.Namespace) -> int:
    from omni_discovery.commands.terminal import print_json
    from omni_discovery.commands.why.waterfall import replayed_line
    from omni_discovery.receipts.replay import Replayed, replay

    code = 0
    for attempt in (attempt for receipt in receipts for attempt in receipt.attempts):
        picking = attempt.picking
        replayed = Replayed() if picking is None else replay(picking)
        if picking is not None and replayed.lacks:
            code = code or _LACKS_INPUT
        elif picking is not None and replayed.choice != picking.chosen:
            code = _OTHER_CHOICE
        if arguments.json:
            about = {"stage": attempt.stage, "attempt": attempt.attempt, "chosen": picking.chosen if picking else ""}
            print_json({**about, "again": replayed.choice, "lacks": replayed.lacks, "note": replayed.note})
        else:
            _print([replayed_line(attempt, replayed)])
    return code


def _show_failures(asks: Sequence[Ask], arguments: argparse.Namespace) -> int:
    from omni_discovery.commands.terminal import print_json
    from omni_discovery.commands.why.waterfall import listed
    from omni_discovery.receipts.asking import path_of
    from omni_discovery.receipts.receipt import ReceiptLine

    lines = _all_of(ask_all(asks, path_of("requests", failed=1, limit=arguments.limit)), "requests", ReceiptLine)
    lines = sorted(lines, key=lambda each: each.received_at)[-arguments.limit :]
    if arguments.json:
        for line in lines:
            print_json(line)
    else:
        _print(listed(lines, _width()) or ["no request has failed that these hubs keep a receipt of"])
    return 0


def _show_waiting(asks: Sequence[Ask], arguments: argparse.Namespace) -> int:
    from omni_discovery.commands.terminal import print_json
    from omni_discovery.commands.why.waterfall import waiting
    from omni_discovery.receipts.asking import path_of
    from omni_discovery.receipts.receipt import WaitingWork

    answers = ask_all(asks, path_of("requests", waiting=1, limit=_MOST_LISTED))
    works = sorted(_all_of(answers, "waiting", WaitingWork), key=lambda each: -each.since_s)
    if arguments.json:
        for work in works:
            print_json(work)
    else:
        _print(waiting(works, _width()))
    return 0


def _show_replica(asks: Sequence[Ask], stage: str, replica: str, arguments: argparse.Namespace) -> int:
    from omni_discovery.commands.terminal import print_json
    from omni_discovery.commands.why.waterfall import replica_lines
    from omni_discovery.receipts.asking import path_of
    from omni_discovery.receipts.receipt import ReplicaReport

    answers = ask_all(asks, path_of("replicas", stage, replica))
    reports = _all_of(
        [{"replica": [answer["replica"]]} for answer in answers if "replica" in answer], "replica", ReplicaReport
    )
    for number, report in enumerate(reports):
        if arguments.json:
            print_json(report)
        else:
            _print([""] if number else [])
            _print(replica_lines(report, _width()))
    return 0
