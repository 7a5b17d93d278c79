"""How what is done all the time grows with replicas, streams and hubs: ``python -m tests.bench.growth``.

Each path is made ready at several sizes over three decades, and run again and again: the least processor time of the
thread counts, since others on the machine can only add to it. The fit is ``fixed + each * size``, by least squares of
the relative error; the exponent is the slope between the last two sizes. Paths that go through all replicas, or give
something to each stream, can't but grow with them: those are dashed in the picture.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from omni_discovery import wire
from omni_discovery.balancing.base import Task
from omni_discovery.etcd.keepalive import _Stream
from omni_discovery.kv import KeyValue, Listing, PutEvent, WatchBatch
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, encode_record
from omni_discovery.view.table import Delta, ReplicaTable, View
from omni_discovery.wire.session import Peer
from stage_runtime.config import ServerConfig
from stage_runtime.engine_loop.jobs import Finished, Job, Outcome, OutputChunk, Work
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.engines.base import EngineOutput
from stage_runtime.lifecycle import LifeState
from stage_runtime.server.credits import CreditBook
from stage_runtime.server.handshake import ReplicaState
from stage_runtime.server.outbox import Outbox, SendResult
from stage_runtime.server.sessions import Sessions
from tests.bench import growth_plot, report
from tests.bench.ours import record
from tests.bench.picking import full_pool
from tests.guard.paths import LinkedHub, Run, linked_replica, running_loop
from tests.support.pools import accept
from tests.support.replica_engine import ScriptedEngine, at_once

_REPLICAS: Final = (10, 100, 1000, 10_000)
_STREAMS: Final = (10, 100, 1000)
_HUBS: Final = (1, 10, 100)
_NAMESPACE: Final = "growth"


@dataclass(frozen=True, slots=True)
class Growing:
    """One path: ``make(size)`` returns what runs it. ``must`` is the exponent that it can't do without."""

    group: str
    name: str
    of: str
    sizes: tuple[int, ...]
    make: Callable[[int], Run]
    turns: int = 20
    must: int = 0


# ---- replicas: a pick


def _pick(size: int, policy: str) -> Run:
    pool = full_pool(policy, size, (1.0,), True)
    core, now_s = pool.core, pool.now()
    tasks: list[Task] = [
        {"request_id": "r", "engine_inputs": {"prompt": f"{number} " * 20}, "sampling_params": {}}
        for number in range(100)
    ]
    for number in range(size):
        if core.try_pick(f"busy{number}", tasks[number % 100]) is not None:
            accept(core, f"busy{number}")

    def run(turns: int) -> None:
        for turn in range(turns):
            name = f"r{turn}"
            binding = core.try_pick(name, tasks[turn % 100])
            assert binding is not None
            accept(core, name)
            pool.release(name)
            core.report(binding.addr, 1, now_s)
            core.grant(binding.addr, 1)

    return run


# ---- replicas and hubs: the view


def _item(number: int, revision: int, queue_length: int = 0) -> KeyValue:
    return KeyValue(
        keys.replica_key(_NAMESPACE, 0, number), encode_record(record(number, queue_length)), 1, revision, number + 1
    )


def _hub_item(number: int) -> KeyValue:
    return KeyValue(keys.hub_key(_NAMESPACE, f"hub{number}"), encode_record(HubRecord(hub_id=f"hub{number}")), 1, 1, 9)


def _table(replicas: int, hubs: int) -> ReplicaTable:
    made = ReplicaTable(_NAMESPACE)
    beats = (KeyValue(keys.beat_key(_NAMESPACE, f"hub{number}"), b"{}", 1, 1, 9) for number in range(hubs))
    items = (*(_item(n, 1) for n in range(replicas)), *(_hub_item(n) for n in range(hubs)), *beats)
    made.replace(Listing(1, 1, items), 1.0)
    return made


def _table_event(size: int) -> Run:
    made = _table(size, 1)
    # Each change is another value than the one before.
    sets = [[_item(number % size, 0, 1 + number + 100 * which) for number in range(50)] for which in range(2)]
    rounds = iter(range(1 << 30))

    def run(turns: int) -> None:
        items = sets[next(rounds) % 2]
        for turn in range(turns):
            revision = made.snapshot().revision + 1
            delta = made.apply(WatchBatch(revision, (PutEvent(_with_revision(items[turn], revision)),)), 2.0)
            assert delta.updated

    return run


def _with_revision(item: KeyValue, revision: int) -> KeyValue:
    return KeyValue(item.key, item.value, item.create_revision, revision, item.lease_id)


def _beat_event(size: int) -> Run:
    made = _table(100, size)

    def run(turns: int) -> None:
        for turn in range(turns):
            revision = made.snapshot().revision + 1
            key = keys.beat_key(_NAMESPACE, f"hub{turn % size}")
            made.apply(WatchBatch(revision, (PutEvent(KeyValue(key, b"{}", 1, revision, 9)),)), 2.0)

    return run


def _list(size: int) -> Run:
    items = tuple(_item(number, 1) for number in range(size))

    def run(turns: int) -> None:
        for _ in range(turns):
            ReplicaTable(_NAMESPACE).replace(Listing(1, 1, items), 1.0)

    return run


def _compare(size: int) -> Run:
    made = _table(size, 1)

    def run(turns: int) -> None:
        for _ in range(turns):
            made.summary()

    return run


def _linked_hub(replicas: int, slots: int = 1) -> LinkedHub:
    """A hub that is connected to all of them at once; the clock has no part in it."""
    membership = "hub.replicas.membership"
    with patch(f"{membership}.AT_ONCE", replicas), patch(f"{membership}.most_unanswered", lambda _: replicas):
        made = LinkedHub(replicas, slots)
    assert len(made.links) == replicas
    return made


def _hub_event(size: int) -> Run:
    made = _linked_hub(size)
    view = View({(0, number): linked_replica(number) for number in range(size)}, revision=1)
    revisions = iter(range(2, 1 << 30))

    def run(turns: int) -> None:
        for turn in range(turns):
            info, revision = linked_replica(turn % size, turn + 1), next(revisions)
            # The table's copy is counted with the table.
            after = View(view.replicas, revision=revision)
            delta = Delta(updated=(info,), since_revision=revision - 1)
            made.hub._membership.apply(after, delta)

    return run


# ---- replicas: leases


def _keepalive(size: int) -> Run:
    class Channel:
        endpoint = "etcd:2379"

    stream: Any = _Stream(Channel(), ())  # type: ignore[arg-type]
    stream._task.cancel()
    for lease_id in range(size):
        stream.send(lease_id)

    def run(turns: int) -> None:
        for turn in range(turns):
            lease_id = turn % size
            stream._settle(lease_id, 10)
            stream.send(lease_id)
            stream._requests.get_nowait()

    return run


# ---- streams


def _hub_piece(size: int) -> Run:
    made = _linked_hub(16, size)
    begun = [(f"s{number}", *made.begin(f"s{number}")) for number in range(size)]
    numbers = iter(range(1 << 30))

    def run(turns: int) -> None:
        for turn in range(turns):
            name, link, attempt = begun[turn % min(size, 10)]
            made.piece(name, link, next(numbers) // min(size, 10), attempt)
        made.outputs.clear()

    return run


def _hub_request(size: int) -> Run:
    made = _linked_hub(16, size + 1)
    for number in range(size):
        made.begin(f"s{number}")
    numbers = iter(range(1 << 30))

    def run(turns: int) -> None:
        for _ in range(turns):
            name = f"r{next(numbers)}"
            link, attempt = made.begin(name)
            made.piece(name, link, 0, attempt)
            made.end(name, link, 1, attempt)
        made.outputs.clear()

    return run


class _LinkedReplica:
    """All that is between a replica's sockets and its engine, with so many hubs and so many slots."""

    def __init__(self, hubs: int, slots: int) -> None:
        self.jobs: list[Job] = []
        state = ReplicaState(lambda: LifeState.READY, lambda: slots)

        def send(_hub: str, _frames: Any) -> SendResult:
            return SendResult.SENT

        boxes = Outbox(send, 100_000, 1 << 30), Outbox(send, 100_000, 1 << 30)
        self.sessions = Sessions(ServerConfig(), state, Counter(), self.jobs.append, *boxes)
        self.sessions.handshake.registered_epoch = 7
        self.sessions.handshake.follow_epoch()
        self.peers = [Peer(f"h{number}/1", f"h{number}") for number in range(hubs)]
        for peer in self.peers:
            for receive in (self.sessions.on_input, self.sessions.on_output):
                receive(peer, wire.encode(wire.Hello(hub_id=peer.name.partition("/")[0], epoch=7)), 0.0)
        self.sessions.flush_messages(0.0)

    def begin(self, hub: int, name: str) -> Work:
        """A request comes from a hub and goes to the engine."""
        submit = wire.Submit(epoch=7, request_id=name, inputs={"prompt": "hello"})
        self.sessions.on_input(self.peers[hub], wire.encode(submit), 1.0)
        self.sessions.flush_messages(1.0)
        work = self.jobs.pop()
        assert isinstance(work, Work)
        self.jobs.clear()
        return work

    def deliver(self, outcome: Outcome) -> None:
        """The engine has put something out."""
        self.sessions.deliver_outcomes([outcome])
        self.sessions.flush_messages(1.0)


def _replica_piece(size: int) -> Run:
    made = _LinkedReplica(1, size)
    works = [made.begin(0, f"s{number}") for number in range(size)]

    def run(turns: int) -> None:
        for turn in range(turns):
            made.deliver(OutputChunk(works[turn % size].key, "text", "word ", (1000,)))

    return run


def _replica_request(hubs: int) -> Run:
    made, numbers = _LinkedReplica(hubs, 16), iter(range(1 << 30))

    def run(turns: int) -> None:
        for turn in range(turns):
            work = made.begin(turn % hubs, f"r{next(numbers)}")
            made.deliver(Finished(work.key, "stop"))
            made.jobs.clear()

    return run


def _credits(hubs: int) -> Run:
    book = CreditBook()
    book.set_capacity(16)
    for number in range(hubs):
        book.open_account(f"h{number}/1", 1)
    book.lend_and_recall(0.0)
    holders = [peer for peer in (f"h{number}/1" for number in range(hubs)) if book.unspent_of(peer)]
    clock = iter(range(1, 1 << 30))

    def run(turns: int) -> None:
        for turn in range(turns):
            now_s, peer = next(clock) * 0.001, holders[turn % len(holders)]
            book.begin_request(peer, credit=True)
            book.lend_and_recall(now_s)
            book.end_request(peer)
            book.lend_and_recall(now_s)

    return run


def _engine_step(size: int) -> Run:
    engine, said = ScriptedEngine(), list[Outcome]()
    engine.capacity = size
    loop = EngineLoop(engine, Payloads(0, {}, lambda: 1.0), {}, said.extend, lambda: 1.0, at_once)
    names = [f"r{number}" for number in range(size)]
    for name in names:
        loop.jobs.put(Work(name, f"h/{name}", name, 0, {"prompt": "hi"}, {}, (), (), 1.0, 61.0))
    loop.turn()
    step = [EngineOutput(name, text="word ", token_ids=(1,)) for name in names]

    def run(turns: int) -> None:
        for _ in range(turns):
            engine.steps.append(step)
            loop.turn()
            said.clear()

    return run


PATHS: Final = (
    *(
        Growing("picks", f"pick and release, {policy}", "replicas", _REPLICAS, partial(_pick, policy=policy), 100)
        for policy in ("least-load", "power-of-two", "least-queue-length", "round-robin", "random", "prefix-hash")
    ),
    Growing("registry", "hub: a changed record in the table", "replicas", _REPLICAS, _table_event, 50),
    Growing("registry", "hub: a changed record in the pool", "replicas", _REPLICAS, _hub_event, 50),
    Growing("registry", "hub: a list", "replicas", _REPLICAS, _list, 2, must=1),
    Growing("registry", "hub: the table's summary, once a minute", "replicas", _REPLICAS, _compare, 5, must=1),
    Growing("registry", "a renewal beside so many leases", "replicas", _REPLICAS, _keepalive, 50),
    Growing("streams", "hub: a piece", "streams", _STREAMS, _hub_piece, 50),
    Growing("streams", "hub: a request of one piece", "streams", _STREAMS, _hub_request, 20),
    Growing("streams", "replica: a piece", "streams", _STREAMS, _replica_piece, 50),
    Growing("streams", "replica: a step for all", "streams", _STREAMS, _engine_step, 5, must=1),
    Growing("hubs", "hub: a beat of another hub", "hubs", _HUBS, _beat_event, 50),
    Growing("hubs", "replica: its credits, a request", "hubs", _HUBS, _credits, 50),
    Growing("hubs", "replica: a request", "hubs", _HUBS, _replica_request, 20),
)


def _each() -> Iterator[tuple[Growing, int]]:
    return ((path, size) for path in PATHS for size in path.sizes)


def _run_once(path: Growing, size: int, around: Callable[[Callable[[], None]], None]) -> None:
    run = path.make(size)
    run(path.turns)
    gc.collect()
    gc.disable()
    around(lambda: run(path.turns))
    gc.enable()


def _times(repeats: int) -> list[int]:
    found: list[int] = []

    def least(work: Callable[[], None]) -> None:
        took = []
        for _ in range(repeats):
            began = time.thread_time_ns()
            work()
            took.append(time.thread_time_ns() - began)
        found.append(min(took))

    def run_all() -> None:
        for path, size in _each():
            _run_once(path, size, least)

    running_loop(run_all)
    return found


def fit(sizes: Sequence[int], costs: Sequence[float]) -> tuple[float, float, float]:
    """``fixed`` and ``each`` of ``fixed + each * size``, neither below 0, and the exponent between the last two."""
    weights = [1 / cost**2 for cost in costs]
    total = sum(weights)
    mean_size = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    mean_cost = sum(w * cost for w, cost in zip(weights, costs, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, size in zip(weights, sizes, strict=True))
    both = sum(w * (size - mean_size) * (cost - mean_cost) for w, size, cost in zip(weights, sizes, costs, strict=True))
    each = max(0.0, both / spread)
    exponent = math.log(costs[-1] / costs[-2]) / math.log(sizes[-1] / sizes[-2])
    return max(0.0, mean_cost - each * mean_size), each, exponent


def rows(costs: Sequence[int]) -> list[report.Row]:
    """A row for each path, from what each turn of ``_each`` has cost in all."""
    left, found = iter(costs), list[report.Row]()
    for path in PATHS:
        each_turn = [round(next(left) / path.turns) for _ in path.sizes]
        fixed, each, exponent = fit(path.sizes, each_turn)
        found.append(
            {
                "group": path.group,
                "path": path.name,
                "of": path.of,
                "sizes": path.sizes,
                "costs": each_turn,
                "fixed": round(fixed),
                "each": round(each, 2),
                "exponent": round(exponent, 2),
                "must": path.must,
            }
        )
    return found


def markdown(found: Sequence[report.Row], unit: str) -> str:
    """The rows as tables of a page, one for each thing that grows."""
    lines: list[str] = []
    for of in dict.fromkeys(row["of"] for row in found):
        chosen = [row for row in found if row["of"] == of]
        sizes = chosen[0]["sizes"]
        lines += [
            "",
            f"| {unit} | {' | '.join(f'{_grouped(size)} {of}' for size in sizes)} | fitted | exponent at the end |",
        ]
        lines += ["|---" * (len(sizes) + 3) + "|"]
        for row in chosen:
            fitted = f"{_grouped(row['fixed'])} + {row['each']:g} each"
            cells = " | ".join(_grouped(cost) for cost in row["costs"])
            lines.append(f"| {row['path']} | {cells} | {fitted} | {row['exponent']:.2f} |")
    return "\n".join(lines)


def _grouped(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def main() -> None:
    """Measure, print the tables in Markdown, write all as JSON and the picture as SVG."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="of each")
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    parser.add_argument("--plot", type=Path, help="path of the SVG file to write")
    arguments = parser.parse_args()
    costs, unit = _times(arguments.repeats), "ns of a turn"
    found = rows(costs)
    sys.stdout.write(markdown(found, unit) + "\n")
    if arguments.out is not None:
        report.write(arguments.out, {"unit": unit, "machine": report.machine(), "rows": found})
    if arguments.plot is not None:
        arguments.plot.write_text(growth_plot.draw(found, unit))


if __name__ == "__main__":
    main()
