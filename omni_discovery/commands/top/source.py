"""TopSource: what ``omni top`` shows, kept up to date: the watched registry, beats, requests that hubs have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from omni_discovery.commands.history import merge, read_registry
from omni_discovery.commands.history_log import history_file, read_log
from omni_discovery.commands.operate import OperationFailedError, Target, act, is_last_to_serve, must_be_registered
from omni_discovery.commands.registry import ANSWER_S
from omni_discovery.commands.top.rows import Moment
from omni_discovery.commands.top.traffic import Traffic, read_traffic, slowest
from omni_discovery.commands.why.waterfall import replica_lines, waterfall
from omni_discovery.errors import OmniError, RegistryError
from omni_discovery.receipts.asking import ask_at_once, path_of
from omni_discovery.receipts.receipt import Receipt, ReceiptLine, ReplicaReport
from omni_discovery.records import keys
from omni_discovery.records.beat import BeatReader, BeatRecord
from omni_discovery.view.hub_reports import read_reports
from omni_discovery.view.recent_events import RecentEvents
from omni_discovery.view.table import ReplicaTable
from omni_discovery.view.watcher import Watcher

if TYPE_CHECKING:
    from omni_discovery.commands.history_log import Life
    from omni_discovery.commands.operate import OperatorAction
    from omni_discovery.kv import KVStore, LeaseTime
    from omni_discovery.records.schema import ReplicaInfo
    from omni_discovery.view.replica_map import ReplicaId
    from omni_discovery.view.table import Delta, View

    #: Asks one hub for a path.
    Ask = Callable[[str], dict[str, Any]]
    #: The hubs to ask, given the view.
    FindHubs = Callable[[View], Sequence[Ask]]

#: How often beats are read, hubs asked, and the past read again after a replica has left.
_BEATS_S: Final = 1.0
#: How often it is asked whether there is a first list.
_FIRST_S: Final = 0.05
_HUBS_S: Final = 2.0
_PAST_S: Final = 5.0
#: How often etcd is asked what a lease has left: so often for one lease, and for one after the other so much apart,
#: which bounds what a screen asks for, however many replicas there are.
_LEASES_S: Final = 2.0
_LEASE_S: Final = 0.1
_MOST_LEASES: Final = 100
#: Requests that a hub is asked for each time: it decodes as many.
MOST_LINES: Final = 200
_MOST_SLOW: Final = 50
#: Lives of one replica that its page shows.
_MOST_LIVES: Final = 20


class TopSource:
    """Lives on one loop. ``moment`` is what there is to show now; ``problem`` says what could not be found out."""

    def __init__(self, kv: KVStore, namespace: str, find_hubs: FindHubs, folder: Path) -> None:
        self._kv = kv
        self._namespace = namespace
        self._find_hubs = find_hubs
        self._log_file = history_file(folder, namespace)
        self._table = ReplicaTable(namespace)
        self._watcher = Watcher(kv, self._table, keys.namespace_prefix(namespace), self._on_view)
        self._tasks: list[asyncio.Task[None]] = []
        self.events = RecentEvents()
        self._beats: Mapping[str, BeatRecord] | None = None
        self._reader = BeatReader(namespace)
        #: The newest lines of each hub that has answered last.
        self._lines: Sequence[Sequence[ReceiptLine]] = ()
        self._traffic = Traffic()
        self._lives: Sequence[Life] = ()
        self._past_is_old = asyncio.Event()
        self._past_is_old.set()
        self.problem = ""
        #: The names of the replicas on the screen: the leases of no others are asked for.
        self.in_sight: Sequence[str] = ()
        self._leases: dict[int, LeaseTime] = {}

    def start(self) -> None:
        """Begin to watch and to ask; returns at once."""
        self._watcher.start()
        each = (self._follow_beats, self._follow_hubs, self._follow_past, self._follow_leases)
        self._tasks = [asyncio.create_task(follow(), name=f"top-{follow.__name__}") for follow in each]

    async def close(self) -> None:
        """Stop. Idempotent. The connection is its owner's."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._watcher.close()

    def moment(self) -> Moment:
        """All that the rows are made of, now."""
        view = self._table.snapshot()
        reports = None if self._beats is None else read_reports(view, self._beats)
        return Moment(view, time.time(), reports, self._traffic, self._ends(), self._leases)

    def _ends(self) -> dict[ReplicaId, str]:
        return {(life.stage_id, life.replica_id): life.short_end for life in self._lives if life.is_gone}

    # ---- what is followed

    def _on_view(self, view: View, delta: Delta) -> None:
        self.events.follow_view(view, delta, time.time())
        if delta.removed:
            self._past_is_old.set()

    async def _follow_beats(self) -> None:
        while True:
            view = self._table.snapshot()
            if not view.revision or view.stale_since_s is not None:
                self._beats = None
            else:
                # Not listed: whoever may write beats may write any number of them.
                self._beats = self._reader.read(self._table.beats(), view.hubs)
                reports = read_reports(view, self._beats)
                troubles = [seen.trouble for each in reports.troubles.values() for seen in each]
                self.events.follow_troubles(troubles, time.time())
            await asyncio.sleep(_BEATS_S if view.revision else _FIRST_S)

    async def _follow_hubs(self) -> None:
        path = path_of("requests", limit=MOST_LINES)
        while True:
            view = self._table.snapshot()
            problem = ""
            by_hub: dict[str, list[ReceiptLine]] = {}
            try:
                for answer in await asyncio.to_thread(ask_at_once, self._find_hubs(view), path):
                    try:
                        if isinstance(answer, OmniError):
                            raise answer
                        lines = msgspec.convert(answer.get("requests", []), list[ReceiptLine])
                        by_hub.setdefault(str(answer.get("hub", len(by_hub))), lines)
                    except (OmniError, msgspec.ValidationError) as error:
                        problem = str(error)
            except OmniError as error:
                problem = str(error)
            self._lines, self.problem = [*by_hub.values()], problem
            self._traffic = read_traffic(self._lines, MOST_LINES, time.time(), len(view.hubs.keys() - view.revoked))
            await asyncio.sleep(_HUBS_S)

    async def _follow_past(self) -> None:
        """Read how processes ended, at first and after one has left."""
        while True:
            await self._past_is_old.wait()
            self._past_is_old.clear()
            try:
                self._lives = await self._read_lives()
            except RegistryError:
                self._past_is_old.set()
            await asyncio.sleep(_PAST_S)

    async def _follow_leases(self) -> None:
        """Ask what the leases in sight have left, one after the other."""
        while True:
            began_s = time.monotonic()
            by_name = {info.name: info for info in self._table.snapshot().replicas.values()}
            seen = [by_name[name] for name in self.in_sight[:_MOST_LEASES] if name in by_name]
            asked = [info.lease_id for info in seen if info.lease_id]
            self._leases = {lease_id: self._leases[lease_id] for lease_id in asked if lease_id in self._leases}
            try:
                for lease_id in asked:
                    await self._ask_lease(lease_id)
                    await asyncio.sleep(_LEASE_S)
            except RegistryError:
                # What it had left before is no news while etcd is away, and leases stand still.
                self._leases = {}
            await asyncio.sleep(max(_LEASE_S, _LEASES_S - (time.monotonic() - began_s)))

    async def _ask_lease(self, lease_id: int) -> None:
        left = await self._kv.lease_time(lease_id)
        if left is None:
            self._leases.pop(lease_id, None)
        else:
            self._leases[lease_id] = left

    async def _read_lives(self) -> list[Life]:
        past = await read_registry(self._kv, self._namespace)
        lives, _, _ = await asyncio.to_thread(lambda: merge(past, read_log(self._log_file)))
        return lives

    # ---- what a key asks for

    async def is_last(self, info: ReplicaInfo) -> bool:
        """Whether nobody else serves its stage. Raise RegistryError."""
        return info.takes_new_work and await is_last_to_serve(self._kv, self._target(info))

    async def carry_out(self, info: ReplicaInfo, action: OperatorAction, weight: float | None = None) -> str:
        """Do it to this life of a replica; return what was done. Raise OmniError."""
        target = self._target(info)
        before = await must_be_registered(self._kv, target)
        if before.epoch != info.epoch:
            raise OperationFailedError(f"replica {target} is another process by now (epoch {before.epoch}): look again")
        return await act(self._kv, target, before, action, weight, ANSWER_S)

    def _target(self, info: ReplicaInfo) -> Target:
        return Target(self._namespace, info.stage_id, info.replica_id)

    async def lives_of(self, info: ReplicaInfo) -> list[Life]:
        """The last lives of a replica's id, the newest last. Raise RegistryError."""
        self._lives = await self._read_lives()
        mine = [each for each in self._lives if (each.stage_id, each.replica_id) == (info.stage_id, info.replica_id)]
        return mine[-_MOST_LIVES:]

    async def why(self, info: ReplicaInfo, width: int) -> list[str]:
        """What the hubs that can be asked say of a replica, as ``omni why 0/1`` does."""
        found = []
        for answer in await self._ask_all(path_of("replicas", str(info.stage_id), str(info.replica_id))):
            with suppress(msgspec.ValidationError):
                found += ["", *replica_lines(msgspec.convert(answer.get("replica"), ReplicaReport), width)]
        return found

    def slowest(self) -> list[ReceiptLine]:
        """The requests that took longest, of the last that the hubs have told."""
        return slowest(self._lines, _MOST_SLOW)

    async def receipt(self, name: str, width: int) -> list[str]:
        """The way of one request, as ``omni why`` shows it."""
        for answer in await self._ask_all(path_of("requests", name)):
            with suppress(msgspec.ValidationError):
                found = msgspec.convert(answer.get("receipts", []), list[Receipt])
                return [line for each in found for line in (*waterfall(each, width), "")]
        return ["no hub that can be asked has its receipt any more"]

    async def _ask_all(self, path: str) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        with suppress(OmniError):
            said = await asyncio.to_thread(ask_at_once, self._find_hubs(self._table.snapshot()), path)
            answers += [each for each in said if not isinstance(each, OmniError)]
        return answers


async def ended(work: Coroutine[Any, Any, str]) -> str:
    """What was done, or why it was not, as one sentence."""
    try:
        return await work
    except OmniError as error:
        return f"not done: {error}"
