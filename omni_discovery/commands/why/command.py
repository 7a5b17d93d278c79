"""``omni why``: asks hubs for receipts, and prints what they tell, with what ``omni status`` finds wrong of that."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from omni_discovery.commands.registry import (
    add_registry_options,
    find_endpoints,
    operators_token,
    read_hub_records,
    read_security,
    registry_flags,
    user_runtime_dir,
    with_registry,
)
from omni_discovery.errors import ConfigError, OmniError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from omni_discovery.commands.findings.checks import Finding
    from omni_discovery.commands.status.command import Sight
    from omni_discovery.kv import KVStore
    from omni_discovery.receipts.receipt import Picking, Receipt
    from omni_discovery.receipts.replay import Replayed

    #: Asks one hub for a path.
    Ask = Callable[[str], dict[str, Any]]

_T = TypeVar("_T")

_REPLICA: Final = re.compile(r"(\d{1,9})/(\d{1,9})")
#: Exit codes of ``--replay`` beside 0: another choice, and an input that the receipt has not.
_OTHER_CHOICE: Final = 1
_LACKS_INPUT: Final = 3
_MOST_LISTED: Final = 1000
_URL_SHOWN: Final = 200
#: Hubs of which is said why they have not answered, or not as a hub does.
_MOST_SAID: Final = 16
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
        if arguments.waiting:
            return _show_waiting(arguments)
        if arguments.last_failures:
            return _show_failures(arguments)
        replica = _REPLICA.fullmatch(arguments.what)
        if replica is not None:
            return _show_replica(replica[1], replica[2], arguments)
        return _show_request(_hubs(arguments), arguments)


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
        help="with --all-hubs: send the token to every address that etcd has, not only to https:// proved by"
        " --admin-ca-file; whoever may write hubs' records gets it",
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
        more = "" if arguments.etcd_endpoints else ", or --etcd-endpoints for what etcd alone says"
        raise ConfigError(
            f"no hub of namespace {arguments.namespace!r} runs here under this user: give --namespace, or name a hub"
            f" elsewhere by its --admin-port with --hub http://HOST:PORT (omni hubs shows who there is){more}"
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
    answers, error = _answers_of(asks, path)
    if error is not None:
        raise error
    return answers


def _answers_of(asks: Sequence[Ask], path: str) -> tuple[list[dict[str, Any]], OmniError | None]:
    """The answers of the hubs that have one, one of each hub; or none, and the error that says why."""
    from omni_discovery.commands.output import say
    from omni_discovery.receipts.asking import HubUnaskableError, NoReceiptError, ask_at_once

    answers: dict[str, dict[str, Any]] = {}
    unasked: list[OmniError] = []
    missing: list[OmniError] = []
    for answer in ask_at_once(asks, path):
        match answer:
            case HubUnaskableError():
                unasked.append(answer)
            case NoReceiptError():
                missing.append(answer)
            case OmniError():
                raise answer
            case _:
                # The first counts, and those of this user on this machine are first: others may call themselves so.
                answers.setdefault(str(answer.get("hub", len(answers))), answer)
    if not answers:
        return [], (missing or unasked)[0]
    for each in unasked[:_MOST_SAID]:
        say(str(each), error=True)
    if len(unasked) > _MOST_SAID:
        say(f"and {len(unasked) - _MOST_SAID} hubs more", error=True)
    return [*answers.values()], None


def _all_of(answers: Sequence[dict[str, Any]], name: str, kind: type[_T]) -> list[_T]:
    """The parts of this name of all answers that have such. Raise OmniError if none has, but others."""
    import msgspec

    from omni_discovery.commands.output import say

    found: list[_T] = []
    unread: list[OmniError] = []
    for answer in answers:
        try:
            found += [msgspec.convert(each, kind) for each in answer.get(name, [])]
        except (msgspec.ValidationError, TypeError) as error:
            # One hub that answers nonsense must not hide what the others say.
            unread.append(OmniError(f"a hub's answer can't be read, it may be of another release: {error}"))
    if unread and len(unread) == len(answers):
        raise unread[0]
    for each in unread[:_MOST_SAID]:
        say(str(each), error=True)
    return found


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

    answers, error = _answers_of(asks, path_of("requests", arguments.what))
    if error is not None:
        # What was refused before it began has no receipt: it may be known why all of its kind are.
        _print_of_requests(arguments, answers, ())
        raise error
    receipts = _all_of(answers, "receipts", Receipt)
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
    from omni_discovery.receipts.replay import Replayed

    code = 0
    for attempt in (attempt for receipt in receipts for attempt in receipt.attempts):
        picking = attempt.picking
        replayed = Replayed() if picking is None else _replayed(picking)
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


def _replayed(picking: Picking) -> Replayed:
    from omni_discovery.receipts.replay import Replayed, replay
    from omni_discovery.text import one_line

    try:
        return replay(picking)
    except (ArithmeticError, LookupError, ValueError) as error:
        # A hub may say anything.
        return Replayed(lacks=f"what a pick is made of: {one_line(str(error))}")


def _show_failures(arguments: argparse.Namespace) -> int:
    from omni_discovery.commands.why.waterfall import listed
    from omni_discovery.receipts.asking import path_of
    from omni_discovery.receipts.receipt import ReceiptLine

    answers, error = _asked(arguments, path_of("requests", failed=1, limit=arguments.limit))
    lines = _all_of(answers, "requests", ReceiptLine)
    lines = sorted(lines, key=lambda each: each.received_at)[-arguments.limit :]
    shown = listed(lines, _width()) or ["no request has failed that these hubs keep a receipt of"]
    # Where the error names no stage, it failed where it was last.
    last = [_stage_of(line.replicas[-1]) if line.replicas else None for line in lines]
    failed = [where if line.error_stage is None else line.error_stage for line, where in zip(lines, last, strict=True)]
    stages = {stage_id for stage_id in failed if stage_id is not None}
    return _show_requests(arguments, answers, error, lines, shown, stages)


def _stage_of(name: str) -> int | None:
    found = _REPLICA.fullmatch(name)
    return None if found is None else int(found[1])


def _show_waiting(arguments: argparse.Namespace) -> int:
    from omni_discovery.commands.why.waterfall import waiting
    from omni_discovery.receipts.asking import path_of
    from omni_discovery.receipts.receipt import WaitingWork

    answers, error = _asked(arguments, path_of("requests", waiting=1, limit=_MOST_LISTED))
    works = sorted(_all_of(answers, "waiting", WaitingWork), key=lambda each: -each.since_s)
    stages = {work.stage for work in works if work.stage is not None}
    return _show_requests(arguments, answers, error, works, waiting(works, _width()), stages)


def _show_requests(
    arguments: argparse.Namespace,
    answers: Sequence[dict[str, Any]],
    error: OmniError | None,
    items: Sequence[Any],
    lines: Sequence[str],
    stages: Collection[int],
) -> int:
    """Print requests as ``items`` or ``lines``, then what is wrong at these ``stages``. Raise the error, if any."""
    from omni_discovery.commands.terminal import print_json

    if error is None and arguments.json:
        for item in items:
            print_json(item)
    elif error is None:
        _print(lines)
    _print_of_requests(arguments, answers, stages)
    if error is not None:
        raise error
    return 0


def _show_replica(stage: str, replica: str, arguments: argparse.Namespace) -> int:
    from omni_discovery.commands.terminal import print_json
    from omni_discovery.commands.why.causes import of_replica
    from omni_discovery.commands.why.waterfall import replica_lines, wrapped
    from omni_discovery.receipts.asking import path_of
    from omni_discovery.receipts.receipt import ReplicaReport

    answers, error = _asked(arguments, path_of("replicas", stage, replica))
    reports = _all_of(
        [{"replica": [answer["replica"]]} for answer in answers if "replica" in answer], "replica", ReplicaReport
    )
    name = f"{int(stage)}/{int(replica)}"
    sight, found = _look(arguments), []
    if sight is not None:
        is_registered = sight.registered is None or name in sight.registered
        found = of_replica(sight.each, name, _ids(answers), is_registered=is_registered, is_told=bool(reports))
    if error is not None and not found:
        raise error
    if error is not None:
        _print(wrapped([str(error)], _width()))
    for number, report in enumerate(reports):
        if arguments.json:
            print_json(report)
        else:
            _print([""] if number else [])
            _print(replica_lines(report, _width()))
    _print_causes(arguments, answers, sight, found, is_below=True)
    return 0


# ---- what is wrong, as omni status has it


def _asked(arguments: argparse.Namespace, path: str) -> tuple[list[dict[str, Any]], OmniError | None]:
    """As _answers_of, of the hubs that the flags name; that there are none is an error like others."""
    try:
        return _answers_of(_hubs(arguments), path)
    except ConfigError as error:
        return [], error


def _ids(answers: Sequence[dict[str, Any]]) -> set[str]:
    return {str(answer.get("hub", "")) for answer in answers}


def _look(arguments: argparse.Namespace) -> Sight | None:
    """What etcd shows, for people: ``omni status --json`` has it for scripts.

    None if it is not known where etcd is: that of a hub elsewhere has to be named.
    """
    from omni_discovery.commands.output import quiet_logging
    from omni_discovery.commands.status.command import look

    if arguments.json or (arguments.hub and not arguments.etcd_endpoints):
        return None
    quiet_logging(silent=True)
    security = read_security(arguments)
    try:
        endpoints = find_endpoints(arguments)
    except ConfigError:
        arguments.etcd_endpoints = endpoints = _etcd_of_hubs(arguments)
    return look(arguments.namespace, endpoints, security) if endpoints else None


def _etcd_of_hubs(arguments: argparse.Namespace) -> str:
    """Where the etcd of this user's hubs here is, if it needs no login and no certificate; empty: not known.

    Hubs elsewhere are not asked that: they must not choose where a password of this environment goes.
    """
    from omni_discovery.receipts.asking import HubUnaskableError, NoReceiptError, ask_process, local_hubs, path_of

    folder, namespace = user_runtime_dir(), arguments.namespace
    for pid in local_hubs(folder, namespace):
        with suppress(HubUnaskableError, NoReceiptError):
            if endpoints := ask_process(folder, namespace, pid, path_of("hub")).get("etcd"):
                return str(endpoints)
    return ""


def _print_of_requests(
    arguments: argparse.Namespace, answers: Sequence[dict[str, Any]], stages: Collection[int]
) -> None:
    """What is wrong for requests at these ``stages``."""
    from omni_discovery.commands.why.causes import of_requests

    sight, question = _look(arguments), "--waiting" if arguments.waiting else "--last-failures"
    found = of_requests(sight.needs_and_notes, question, stages, _ids(answers)) if sight is not None else []
    _print_causes(arguments, answers, sight, found, is_below=bool(answers))


def _print_causes(
    arguments: argparse.Namespace,
    answers: Sequence[dict[str, Any]],
    sight: Sight | None,
    found: Sequence[Finding],
    *,
    is_below: bool,
) -> None:
    """What hubs say of themselves, unless etcd says it, and what etcd says, as ``omni status`` prints it.

    ``is_below``: something was printed before.
    """
    if arguments.json:
        return
    from omni_discovery.commands.status.screen import Flags, numbered
    from omni_discovery.commands.terminal import TextConsole
    from omni_discovery.commands.why.waterfall import wrapped

    said = {each.hub for each in found if each.hub}
    own = {str(answer.get("hub", "")): str(answer["problem"]) for answer in answers if "problem" in answer}
    own = {hub: problem for hub, problem in own.items() if hub not in said}
    if is_below and (own or found):
        _print([""])
    _print(wrapped([f"hub {hub}: {problem}" for hub, problem in own.items()], _width()))
    if found and sight is not None:
        console = TextConsole()
        flags = Flags(tuple(registry_flags(arguments)), sight.status.endpoints)
        _print(["etcd says:"])
        console.print(numbered(found, sight.status.host, flags, console.width), soft_wrap=True, end="")
