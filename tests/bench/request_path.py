"""How many files one streamed chat visits: ``python -m tests.bench.request_path``.

A real ``omni serve`` with echo stages of one replica each, embedded etcd and CURVE on. A client sends one streamed
``POST /v1/chat/completions`` with a prompt of one word, so that each stage has one piece to give. The engine waits some
milliseconds before each step: what a replica sends then comes message by message, and the figures repeat. Every Python
process logs its calls (``call_log.py``). Three requests go before, so that no first use is counted.

What is counted, from the moment before the client sends until it has the last byte of the answer:

- A *file* of ours (``hub``, ``omni_discovery``, ``stage_runtime``) is visited when a function defined in it is called.
  Methods that dataclasses or msgspec make have no file and count for none.
- A *hop* is a call of a function in another file than the call before it, in the loop's thread of the hub's process:
  every change of file in the sequence of calls. Resuming a suspended coroutine or generator is a call. Returns are
  none: uvloop calls into our code without a caller in Python, so the sequence is all that there is.

The hub's timers (beats, checks of its children and of its replicas, several in a second) may fall into a request and
add files and hops. The hub's other threads, which speak to etcd, are left out; for the rest the request is repeated.
The result are the files that every round visits, and the fewest hops of any round. The medians are shown beside them
and should be the same.

``--record`` counts the files that one replica's record visits in all threads of the hub: from the watch event with the
record of a replica that is being started, through its session, to the credits that make it pickable. The hub's log
lines tell where that is in the calls: it begins after the last pause before ``replica.attached``, and ends at the first
pause after ``replica.session_up``. Its hops are not told: how its messages fall together differs from round to round.
"""

from __future__ import annotations

import argparse
import ast
import json
import socket
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import urlsplit

from tests.bench import report
from tests.bench.call_log import ROOT, Call, CallLog, prepare
from tests.support.hub import Hub
from tests.support.processes import Child, wait_for

_WORD: Final = "twelve"
#: Before each step of the engine: long enough for one message to be dealt with before the next one comes.
_STEP_S: Final = 0.005
_WARM_UP: Final = 3
#: Between requests: what an answer leaves behind must not count for the next.
_SETTLE_S: Final = 0.5
#: A loop that calls nothing for so long waits.
_WAITS_S: Final = 0.0003
#: Nothing that belongs to one record waits so long.
_PAUSE_S: Final = 0.03


@dataclass(frozen=True, slots=True)
class Visit:
    """The first call of a function in one file."""

    file: str
    function: str
    is_in_hub: bool


@dataclass(frozen=True, slots=True)
class Round:
    """What one request, or one record, visited."""

    #: In the order in which they were visited, of all processes.
    visits: tuple[Visit, ...]
    #: Changes of file in the hub's process.
    hops: int
    #: The same among the files of the package ``hub`` alone.
    package_hops: int
    #: Events of the stream that the client got.
    pieces: int


def count_round(calls: Iterable[Call], hub_pid: int, pieces: int = 0) -> Round:
    """Files and hops of these calls."""
    visits: dict[tuple[str, bool], Visit] = {}
    in_hub: list[Call] = []
    for call in calls:
        if not call.file or call.function == "<module>":
            continue
        is_in_hub = call.pid == hub_pid
        if is_in_hub:
            in_hub.append(call)
        visits.setdefault((call.file, is_in_hub), Visit(call.file, call.function, is_in_hub))
    package = [call for call in in_hub if is_of_package(call.file)]
    return Round(tuple(visits.values()), count_hops(in_hub), count_hops(package), pieces)


def is_of_package(file: str) -> bool:
    """Whether it belongs to the package ``hub``."""
    return file.startswith("hub/")


def count_hops(calls: Sequence[Call]) -> int:
    """Changes of file in the sequence of calls of each thread."""
    last: dict[int, str] = {}
    hops = 0
    for call in calls:
        hops += last.get(call.thread, call.file) != call.file
        last[call.thread] = call.file
    return hops


def stream_chat(url: str) -> tuple[int, float, float]:
    """One streamed chat on a connection of its own: pieces, when it was sent and when its last byte had come."""
    parts = urlsplit(url)
    body = json.dumps({"messages": [{"role": "user", "content": _WORD}], "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    answer = b""
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        began_s = time.monotonic()
        connection.sendall(head.encode() + body)
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            received = connection.recv(1 << 16)
            if not received:
                raise RuntimeError(f"the answer breaks off: {answer.decode()}")
            answer += received
        ended_s = time.monotonic()
    if b" 200 " not in answer.partition(b"\r\n")[0]:
        raise RuntimeError(answer.decode())
    return answer.count(b"data: {"), began_s, ended_s


def trace_requests(stages: int, rounds: int) -> list[Round]:
    """A hub of its own, asked so many times."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        log = prepare(folder)
        hub = Hub.of_yaml(folder, deploy_of(stages))
        try:
            hub.wait_ready()
            for _ in range(_WARM_UP):
                stream_chat(hub.url)
            return [trace_request(hub, log) for _ in range(rounds)]
        finally:
            hub.stop()


def trace_request(hub: Hub, log: CallLog) -> Round:
    """One request, once the one before is over."""
    time.sleep(_SETTLE_S)
    log.start()
    pieces, began_s, ended_s = stream_chat(hub.url)
    pid = hub.process.pid
    calls = [call for call in log.stop() if began_s <= call.at_s <= ended_s]
    in_loop = [call for call in calls if call.pid == pid and call.is_main_thread]
    return count_round(_as_story(in_loop, [call for call in calls if call.pid != pid]), pid, pieces)


def _as_story(in_hub: Sequence[Call], in_replica: Sequence[Call]) -> Sequence[Call]:
    """The replica's calls in one block, where the hub has sent the request and waits."""
    if not in_replica:
        return in_hub
    began_s = in_replica[0].at_s
    for at in range(1, len(in_hub)):
        if in_hub[at].at_s > began_s and in_hub[at].at_s - in_hub[at - 1].at_s > _WAITS_S:
            return [*in_hub[:at], *in_replica, *in_hub[at:]]
    return [*in_hub, *in_replica]


def trace_records(rounds: int) -> list[Round]:
    """A hub without replicas of its own, which so many come to one after the other."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        log = prepare(folder)
        hub = Hub(folder, ["--hub-only", "--deploy-config", str(_written(folder, deploy_of(1)))])
        try:
            wait_for("the hub to listen", lambda: "hub.listening" in hub.text)
            trace_record(hub, log)
            return [trace_record(hub, log) for _ in range(rounds)]
        finally:
            hub.stop()


def trace_record(hub: Hub, log: CallLog) -> Round:
    """Start a replica, wait for its session, stop it."""
    known = hub.text.count("replica.session_up")
    flags = ["--headless", "--stage-id", "0", "--namespace", hub.namespace, "--etcd-endpoints", hub.endpoint]
    log.start()
    replica = Child(["serve", *flags], hub.folder, "replica")
    try:
        wait_for("a session", lambda: hub.text.count("replica.session_up") > known)
        time.sleep(_SETTLE_S)
        calls = [call for call in log.stop() if call.pid == hub.process.pid]
    finally:
        replica.stop()
    wait_for("the replica to be gone", lambda: hub.text.count("replica.removed") > known)
    time.sleep(_SETTLE_S)
    return count_round(_of_record(calls), hub.process.pid)


def _of_record(calls: Sequence[Call]) -> Sequence[Call]:
    """From the last pause before the replica is attached to the first one after its session is up."""
    first = _position(calls, "replica.attached")
    while first > 0 and calls[first].at_s - calls[first - 1].at_s < _PAUSE_S:
        first -= 1
    last = _position(calls, "replica.session_up")
    while last + 1 < len(calls) and calls[last + 1].at_s - calls[last].at_s < _PAUSE_S:
        last += 1
    return calls[first : last + 1]


def _position(calls: Sequence[Call], message: str) -> int:
    return next(at for at, call in enumerate(calls) if not call.file and call.function.startswith(message))


def deploy_of(stages: int) -> str:
    """A deploy document of so many echo stages; the last one speaks to the client."""
    lines = ["model: echo", "stages:"]
    for stage_id in range(stages):
        output = "text" if stage_id == stages - 1 else "none"
        engine = f"engine: echo, engine_args: {{capacity: 8, delay_s: {_STEP_S}}}"
        lines.append(f"  - {{stage_id: {stage_id}, {engine}, final_output: {output}}}")
    return "\n".join(lines) + "\n"


def _written(folder: Path, text: str) -> Path:
    file = folder / "deploy.yaml"
    file.write_text(text)
    return file


def common_visits(rounds: Sequence[Round]) -> list[Visit]:
    """Files that every round visits, in the order of the round with the fewest hops."""
    common = set.intersection(*({(visit.file, visit.is_in_hub) for visit in each.visits} for each in rounds))
    best = min(rounds, key=lambda each: each.hops)
    return [visit for visit in best.visits if (visit.file, visit.is_in_hub) in common]


def summary(what: str, rounds: Sequence[Round]) -> report.Row:
    """The result of all rounds."""
    visits = common_visits(rounds)
    hub_files = [visit.file for visit in visits if visit.is_in_hub]
    row: report.Row = {"what": what, "rounds": len(rounds)}
    is_chat = any(each.pieces for each in rounds)
    if is_chat:
        row |= {"pieces": rounds[0].pieces, "files_in_all": len({visit.file for visit in visits})}
    row |= {"hub_process_files": len(hub_files), "package_hub_files": sum(map(is_of_package, hub_files))}
    if is_chat:
        row |= {
            "hub_process_hops": min(each.hops for each in rounds),
            "package_hub_hops": min(each.package_hops for each in rounds),
            "median_hops": statistics.median(each.hops for each in rounds),
        }
    medians = (sum(visit.is_in_hub for visit in each.visits) for each in rounds)
    return row | {"median_files": statistics.median(medians)}


def raw(each: Round) -> report.Row:
    """One round's figures for the JSON file."""
    in_hub = [visit.file for visit in each.visits if visit.is_in_hub]
    return {
        "files_in_all": len({visit.file for visit in each.visits}),
        "hub_process_files": len(in_hub),
        "package_hub_files": sum(map(is_of_package, in_hub)),
        "hub_process_hops": each.hops,
        "package_hub_hops": each.package_hops,
        "pieces": each.pieces,
    }


def describe(visit: Visit) -> report.Row:
    """One visit with the first sentence of its module."""
    process = "hub" if visit.is_in_hub else "replica"
    return {"file": visit.file, "function": visit.function, "process": process, "about": first_line(visit.file)}


def first_line(file: str) -> str:
    """The first line of a module's docstring; empty if it has none."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
    return text.partition("\n")[0]


# ---- the page


def page_of(rows: Sequence[report.Row], request: Sequence[Visit], record: Sequence[Visit]) -> str:
    """The documentation page; no section about records where there are no visits of one."""
    in_hub = [visit for visit in request if visit.is_in_hub]
    in_replica = [visit for visit in request if not visit.is_in_hub]
    sections = [_HEAD, _figures(rows), _EXPLANATION, "## Stops", _STOPS, _stops(request)]
    sections += ["## Files of the hub's process", _FILES, _folders(in_hub)]
    sections += ["## Files of the replica's process", _folders(in_replica)]
    if record:
        sections += ["## The way of a record", _RECORD.format(count=len(record)), _folders(record)]
    return "\n\n".join(sections) + "\n"


_HEAD: Final = """# The way of a request

Which files one streamed chat visits, in the order of its way: from HTTP through admission to the orchestrator, from a
pool's pick over ZMQ to a replica, and back to the client. Written by
`python -m tests.bench.request_path --record --page docs/request-path.md`; don't edit it by hand."""
_EXPLANATION: Final = """\
A file is visited when a function defined in it is called. A hop is a change of file in the sequence of calls in the
loop's thread of the hub. *Hub process* counts the files of all packages there, *package hub* those under `hub/` alone.
The hub's timers are left out; the script says how."""
_STOPS: Final = """\
First visits in their order, with one stage. Neighbours of one folder stand on one line. Hub and replica work at the
same time; the replica's visits stand where the hub begins to wait for its first message."""
_FILES: Final = "The number is the place in the order of first visits, the function the one that is called first."
_RECORD: Final = """\
{count} files of the hub's process, from the watch event with a new replica's record to the credits that make the
replica pickable."""


def _figures(rows: Sequence[report.Row]) -> str:
    names = [name for name in rows[0] if not name.startswith("median_")]
    lines = [f"| {' | '.join(name.replace('_', ' ') for name in names)} |", "|---" * len(names) + "|"]
    lines += [f"| {' | '.join(str(row.get(name, '')) for name in names)} |" for row in rows]
    return "\n".join(lines)


def _stops(visits: Sequence[Visit]) -> str:
    lines: list[str] = []
    last: tuple[str, bool] | None = None
    for visit in visits:
        folder, stem = _placed(visit.file)
        if (folder, visit.is_in_hub) == last:
            lines[-1] += f", {stem}"
        else:
            where = "" if visit.is_in_hub else "→ replica: "
            lines.append(f"1. {where}`{folder}/` {stem}")
            last = (folder, visit.is_in_hub)
    return "\n".join(lines)


def _folders(visits: Sequence[Visit]) -> str:
    by_folder: dict[str, list[str]] = {}
    for number, visit in enumerate(visits, 1):
        folder, stem = _placed(visit.file)
        about = first_line(visit.file).replace("|", "\\|")
        by_folder.setdefault(folder, []).append(f"| {number} | `{stem}` | `{visit.function}` | {about} |")
    head = "| | file | first called | what it is |\n|---|---|---|---|"
    return "\n\n".join(f"**`{folder}/`**\n\n{head}\n" + "\n".join(lines) for folder, lines in by_folder.items())


def _placed(file: str) -> tuple[str, str]:
    path = PurePosixPath(file)
    return str(path.parent), path.stem


def main() -> None:
    """Trace, print the table, write the JSON file and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--record", action="store_true", help="count what a replica's record visits, too")
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    parser.add_argument("--page", type=Path, help="path of the Markdown page to write")
    arguments = parser.parse_args()
    rounds = {
        "chat, one stage": trace_requests(1, arguments.rounds),
        "chat, two stages": trace_requests(2, arguments.rounds),
    }
    if arguments.record:
        rounds["record"] = trace_records(arguments.rounds)
    rows = [summary(what, each) for what, each in rounds.items()]
    report.show("files and hops", rows)
    visits = {what: common_visits(each) for what, each in rounds.items()}
    results: report.Row = {
        "machine": report.machine(),
        "figures": rows,
        "rounds": {what: [raw(one) for one in each] for what, each in rounds.items()},
        "visits": {what: [describe(visit) for visit in each] for what, each in visits.items()},
    }
    report.write(arguments.out, results)
    if arguments.page is not None:
        arguments.page.write_text(page_of(rows, visits["chat, one stage"], visits.get("record", [])))
        report.console.print(f"written to {arguments.page}")


if __name__ == "__main__":
    main()
