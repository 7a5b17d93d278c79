"""A hub's membership: what a view that brings little costs, and that a short way leads to the same as the long one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hub.config import OutOfSocketsError
from hub.pool.stage_pool import StagePool
from hub.pool.versions import Pools
from hub.replicas.address_claims import AT_ONCE as CLAIMS_AT_ONCE
from hub.replicas.attach_limits import AT_ONCE, MOST_UNANSWERED
from hub.replicas.lost import LostReplicas
from hub.replicas.membership import Membership, ViewChanged
from hub.replicas.stage_client import StageClient
from omni_discovery.balancing.policies import RoundRobinBalancer
from omni_discovery.kv import KeyValue, Listing, PutEvent, WatchBatch
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaInfo, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.testing import FakeKV, ManualClock
from omni_discovery.view.table import Delta, ReplicaTable, View
from omni_discovery.view.watcher import Watcher


def record(stage_id: int, replica_id: int, port: int, epoch: int) -> ReplicaInfo:
    return ReplicaInfo(
        f"tcp://h:{port}", f"tcp://o:{port}", stage_id, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id, epoch=epoch
    )


class Client:
    """What a membership needs of one; notes what it is told."""

    has_open_aborts = False
    named_epoch = 0
    is_connected = True

    def __init__(self, info: ReplicaInfo, told: list[object]) -> None:
        self.info, self.addr = info, info.input_addr
        self._told = told
        told.append(("connect", info))

    def renew(self, info: ReplicaInfo, *, afresh: bool = False) -> None:
        self.info = info
        self._told.append(("renew", info, afresh))

    def close(self) -> None:
        self._told.append(("close", self.info))


class Scene:
    """One membership and all that it does, at a time of its own."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.now_s = 0.0
        self.pools = {stage_id: StagePool(stage_id, RoundRobinBalancer(), now=self._now) for stage_id in range(2)}
        self.membership = Membership(
            Pools(list(self.pools.values())),
            self,
            now=self._now,
        )

    def connect_replica_of(self, info: ReplicaInfo) -> StageClient:
        return cast(StageClient, Client(info, self.told))

    def client_closed(self, client: StageClient) -> None:
        self.told.append(("closed", client.info))

    def replica_lost(self, stage_id: int, addr: str, reason: str) -> None:
        self.told.append((stage_id, addr, reason))

    def serves_document(self, info: ReplicaInfo) -> bool:
        return True

    def _now(self) -> float:
        return self.now_s

    def happens(self, verb: str, which: int, value: bool) -> None:
        """Time passes, or a session comes or goes."""
        if verb == "time":
            self.now_s += which
        else:
            for pool in self.pools.values():
                (pool.core.session_up if value else pool.core.session_down)(f"tcp://h:{which}", self.now_s)
        self.membership.review_members()

    def seen(self) -> object:
        """All that can be told from outside; in one view, what is done to one address before another is open."""
        told: dict[str, list[object]] = {}
        for each in self.told:
            assert isinstance(each, tuple)
            told.setdefault(getattr(each[1], "input_addr", each[1]), []).append(each)
        pools = [
            {
                addr: (entry.info, entry.registered, entry.held, entry.pickable)
                for addr, entry in pool.core.members.entries.items()
            }
            for pool in self.pools.values()
        ]
        members = {(info.stage_id, info.input_addr): info for info in self.membership.members(self.pools.keys())}
        return (told, pools, members)

    @property
    def next_review_s(self) -> float:
        """When time alone makes a review due; infinite if it does not."""
        due_s = self.membership.next_review_s
        return float("inf") if due_s is None else due_s


def delta_of(before: View, after: View) -> Delta:
    """What a table would say that changed from one view to the next."""
    old, new = before.replicas, after.replicas
    anew = {key for key in old.keys() & new.keys() if old[key].epoch != new[key].epoch}
    return Delta(
        added=tuple(new[key] for key in sorted(new.keys() - old.keys() | anew)),
        updated=tuple(new[key] for key in sorted(old.keys() & new.keys() - anew) if old[key] != new[key]),
        removed=tuple(old[key] for key in sorted(old.keys() - new.keys() | anew)),
        since_revision=before.revision,
    )


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.integers(0, 5), st.integers(0, 9)),
        st.tuples(st.just("status"), st.integers(0, 5), st.sampled_from(list(ReplicaStatus))),
        st.tuples(st.just("move"), st.integers(0, 5), st.integers(0, 7)),
        st.tuples(st.just("renew"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("add"), st.integers(0, 5), st.integers(0, 7)),
        st.tuples(st.just("answers"), st.integers(0, 7), st.booleans()),
        st.tuples(st.just("stale"), st.booleans(), st.just(0)),
        st.tuples(st.just("history"), st.just(0), st.just(0)),
        st.tuples(st.just("time"), st.integers(1, 15), st.just(0)),
        st.tuples(st.just("look"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(_steps)
def test_the_short_way_through_a_view_leads_where_the_long_one_does(steps: list[tuple[str, Any, Any]]) -> None:
    """Records change, move to ports of others, come and go, the registry goes back, sessions and time pass."""
    scenes = [Scene(), Scene()]
    records = {(key % 3, key): record(key % 3, key, key, key + 1) for key in range(4)}
    epoch, revision, history, stale = 100, 1, 0, False
    last = View(dict(records), revision=1)
    for scene in scenes:
        scene.membership.apply(last, Delta())
    for verb, which, value in steps:
        key = (which % 3, int(which))
        epoch, revision = epoch + 1, revision + 1
        if verb == "history":
            history += 1
        elif verb == "stale":
            stale = which
        elif verb in ("answers", "time"):
            for scene in scenes:
                scene.happens(verb, which, value)
        elif verb == "add":
            records[key] = record(*key, port=value, epoch=epoch)
        elif verb == "remove":
            records.pop(key, None)
        elif key in records:
            changes = {
                "load": {"queue_length": value},
                "status": {"status": value},
                "move": {"input_addr": f"tcp://h:{value}"},
                "renew": {"epoch": epoch},
            }
            records[key] = replace(records[key], **changes.get(verb, {}))
        view = View(dict(records), revision=revision, history=history, stale_since_s=1.0 if stale else None)
        scenes[0].membership.apply(view, delta_of(last, view))
        scenes[1].membership.apply(view, Delta())
        last = view
        assert scenes[0].seen() == scenes[1].seen()
        # A turn that nobody needs any more ends with the next view, or with its time: one review too many.
        assert scenes[0].next_review_s <= scenes[1].next_review_s


def test_one_new_load_among_a_thousand_takes_a_short_way() -> None:
    """Not by the clock alone: nobody else is told anything, and nothing is compared at length."""
    scene, records = Scene(), {(0, each): record(0, each, each, each + 1) for each in range(1000)}
    last = View(dict(records), revision=1)
    scene.membership.apply(last, Delta())
    while "tcp://h:7" not in scene.membership.clients:
        scene.membership.review_members()
    del scene.told[:]
    took_s = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Membership, "_replace_all", lambda *_, **__: pytest.fail("the long way"))
        for revision in range(2, 52):
            records[0, 7] = replace(records[0, 7], queue_length=revision)
            view = View(dict(records), revision=revision)
            delta, last = delta_of(last, view), view
            began_s = time.perf_counter()
            scene.membership.apply(view, delta)
            took_s.append(time.perf_counter() - began_s)
    assert scene.told == [("renew", replace(records[0, 7], queue_length=each), False) for each in range(2, 52)]
    assert min(took_s) < 0.005


def test_a_delta_from_another_view_than_the_last_is_not_trusted() -> None:
    """1. replica 0; 2. a view with replica 1 is missed; 3. the next delta only tells of a load: 1 is connected, too."""
    scene = Scene()
    first = View({(0, 0): record(0, 0, 0, 1)}, revision=1)
    missed = View({**first.replicas, (0, 1): record(0, 1, 1, 2)}, revision=2)
    last = View({**missed.replicas, (0, 0): replace(first.replicas[0, 0], queue_length=1)}, revision=3)
    scene.membership.apply(first, Delta())
    scene.membership.apply(last, delta_of(missed, last))
    assert set(scene.membership.clients) == {"tcp://h:0", "tcp://h:1"}


def test_views_that_are_merged_lead_the_short_way() -> None:
    """1. two loads change in two views, seen as one; 2. a replica comes in a third"""
    records = {(0, each): record(0, each, each, each + 1) for each in range(3)}
    first = View(dict(records), revision=1)
    second = View({**records, (0, 0): replace(records[0, 0], queue_length=1)}, revision=2)
    third = View({**second.replicas, (0, 1): replace(records[0, 1], queue_length=2)}, revision=3)
    merged = ViewChanged(second, delta_of(first, second)).followed_by(ViewChanged(third, delta_of(second, third)))
    assert (merged.view, merged.delta.since_revision, len(merged.delta.updated)) == (third, 1, 2)
    scene = Scene()
    scene.membership.apply(first, Delta())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Membership, "_replace_all", lambda *_, **__: pytest.fail("the long way"))
        scene.membership.apply(merged.view, merged.delta)
    assert [each.queue_length for each in scene.membership.members([0])] == [1, 2, 0]
    fourth = View({**third.replicas, (0, 3): record(0, 3, 3, 4)}, revision=4)
    changed = merged.followed_by(ViewChanged(fourth, delta_of(third, fourth)))
    scene = Scene()
    scene.membership.apply(first, Delta())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Membership, "_replace_all", lambda *_, **__: pytest.fail("the long way"))
        scene.membership.apply(changed.view, changed.delta)
    assert [each.queue_length for each in scene.membership.members([0])] == [1, 2, 0, 0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["load", "renew", "toggle", "move"]), st.integers(0, 3)), max_size=30))
def test_views_that_are_merged_lead_where_each_of_them_does(steps: list[tuple[str, int]]) -> None:
    """Records come, go, come back, move and change between two views that are applied."""
    records = {(0, each): record(0, each, each, each + 1) for each in range(2)}
    first = View(dict(records), revision=1)
    scenes, merged, last = [Scene(), Scene()], ViewChanged(first, Delta(since_revision=1)), first
    for scene in scenes:
        scene.membership.apply(first, Delta())
    for revision, (verb, which) in enumerate(steps, 2):
        key = (0, which)
        if verb == "toggle" and records.pop(key, None) is None:
            records[key] = record(0, which, which, revision)
        elif key in records:
            changes = {
                "load": {"queue_length": revision},
                "renew": {"epoch": revision},
                "move": {"input_addr": f"tcp://h:{100 + revision}"},
            }
            records[key] = replace(records[key], **changes.get(verb, {}))
        view = View(dict(records), revision=revision)
        merged, last = merged.followed_by(ViewChanged(view, delta_of(last, view))), view
    assert merged.delta.since_revision == 1
    scenes[0].membership.apply(merged.view, merged.delta)
    scenes[1].membership.apply(merged.view, Delta())
    for scene in scenes:
        while len(scene.membership.clients) != len(records) or scene.membership.next_review_s is not None:
            scene.now_s += 1.0
            scene.membership.review_members()
    assert scenes[0].seen() == scenes[1].seen()


@pytest.mark.attack("N4")
def test_a_record_that_comes_or_goes_among_thousands_takes_a_short_way() -> None:
    """Whoever may write records makes each of them come and go as fast as etcd takes it."""
    scene, records = Scene(), {(0, each): record(0, each, each, each + 1) for each in range(5000)}
    last = View(dict(records), revision=1)
    scene.membership.apply(last, Delta())
    looked_at: list[ReplicaInfo] = []
    usual = Membership._is_ours
    with pytest.MonkeyPatch.context() as patch:
        for way in (Membership, "_replace_all"), (Membership, "check_mismatches"), (LostReplicas, "follow_view"):
            patch.setattr(*way, lambda *_, **__: pytest.fail("the long way"))
        patch.setattr(Membership, "_is_ours", lambda own, info: looked_at.append(info) or usual(own, info))
        for number in range(20):
            coming = record(0, 6000 + number, 6000 + number, 6000 + number)
            records[0, 6000 + number] = coming
            records.pop((0, 100 + number))
            records[0, 7] = replace(records[0, 7], status=list(ReplicaStatus)[(number + 1) % 2])
            view = View(dict(records), revision=2 + number)
            delta, last = delta_of(last, view), view
            scene.membership.apply(view, delta)
            assert scene.membership.members([0])[-1] == coming
    assert len(scene.membership.members([0])) == 5000
    assert len(looked_at) == 2 * 20, "the one that came and the one that changed, each time"


@pytest.mark.attack("P2")
def test_one_change_among_thousands_of_shared_addresses_takes_a_short_way() -> None:
    """Each of them is looked at again all the same, a few at a time."""
    scene, records = Scene(), {(0, each): record(0, each, each // 2, each + 1) for each in range(4000)}
    last = View(dict(records), revision=1)
    scene.membership.apply(last, Delta())
    looked_at: list[ReplicaInfo] = []
    usual = Membership._is_ours
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Membership, "_is_ours", lambda own, info: looked_at.append(info) or usual(own, info))
        for number in range(2000 // CLAIMS_AT_ONCE + 1):
            records[0, 7000] = record(0, 7000, 7000, 7000 + number)
            view = View(dict(records), revision=2 + number)
            delta, last = delta_of(last, view), view
            before = len(looked_at)
            scene.membership.apply(view, delta)
            assert len(looked_at) - before == 2 * CLAIMS_AT_ONCE + 1
        assert {info.input_addr for info in looked_at} == {f"tcp://h:{each}" for each in (*range(2000), 7000)}
        scene.now_s = 5.0
        due = 0
        while scene.membership._claims.next_look_s == 5.0:
            scene.membership.review_members()
            due += 1
    assert due == -(-2000 // CLAIMS_AT_ONCE)
    assert len({info.replica_id for info in scene.membership.members([0])}) == 2001


@pytest.mark.attack("P2")
def test_one_of_two_that_name_an_address_and_answers_no_more_is_looked_at_at_once() -> None:
    scene, older, newer = Scene(), record(0, 0, 5, epoch=3), record(0, 8, 5, epoch=9)
    first, both = View({(0, 0): older}, revision=1), View({(0, 0): older, (0, 8): newer}, revision=2)
    scene.membership.apply(first, Delta())
    scene.pools[0].core.session_up("tcp://h:5", 0.0)
    scene.membership.apply(both, delta_of(first, both))
    scene.now_s = 20.0
    assert attached(scene) == [(0, 0)]
    scene.pools[0].core.session_down("tcp://h:5", 20.0)
    scene.membership.owner_may_change("tcp://h:5")
    assert scene.membership.next_review_s == 20.0
    scene.membership.review_members()
    assert attached(scene) == [(0, 8)]


@pytest.mark.attack("N4")
def test_a_few_replicas_are_connected_to_and_let_go_of_in_each_turn_of_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. a hundred come in one view: a few are connected to at once, the others in the turns that follow
    2. all go in one view: none is picked any more, and their clients are closed a few at a time; few have a line
    """
    caplog.set_level("INFO")
    scene, records = Scene(), {(0, each): record(0, each, each, each + 1) for each in range(100)}
    first = View(records, revision=1)
    scene.membership.apply(first, Delta())
    for turn in range(1, 26):
        assert len(scene.membership.clients) == AT_ONCE * turn
        due_s = scene.membership.next_review_s
        assert (due_s is None) == (turn == 25) or due_s == scene.now_s
        scene.membership.review_members()
    gone = View(revision=2)
    scene.membership.apply(gone, delta_of(first, gone))
    assert not scene.pools[0].core.members.entries
    for turn in range(1, 26):
        assert len(scene.membership.clients) == 100 - AT_ONCE * turn
        scene.membership.review_members()
    assert caplog.text.count("replica.removed ") == 32
    assert "replica.removed_more count=68" in caplog.text


@pytest.mark.attack("N4")
def test_a_replica_that_comes_back_before_its_client_is_closed_keeps_it() -> None:
    scene, records = Scene(), {(0, each): record(0, each, each, each + 1) for each in range(8)}
    first, gone = View(records, revision=1), View(revision=2)
    scene.membership.apply(first, Delta())
    scene.membership.review_members()
    scene.membership.apply(gone, delta_of(first, gone))
    again = View({(0, 7): replace(records[0, 7], epoch=20)}, revision=3)
    scene.membership.apply(again, delta_of(gone, again))
    while scene.membership.next_review_s is not None:
        scene.membership.review_members()
    assert attached(scene) == [(0, 7)]
    assert ("close", records[0, 7]) not in scene.told


class Registry:
    """A watcher that is fed by hand and delivers to a membership, but for views that are ``missed``."""

    def __init__(self, scene: Scene, replicas: int) -> None:
        self._scene = scene
        self._revision = replicas
        self.missed = False
        clock = ManualClock()
        self._watcher = Watcher(
            FakeKV(clock), ReplicaTable("default"), keys.namespace_prefix("default"), self._deliver, clock=clock
        )
        self._items = [self._replica(number, 0, number + 1) for number in range(replicas)]

    def _deliver(self, view: View, delta: Delta) -> None:
        if not self.missed:
            self._scene.membership.apply(view, delta)

    def _replica(self, replica_id: int, load: int, revision: int) -> KeyValue:
        written = ReplicaRecord(
            stage_id=0,
            replica_id=replica_id,
            input_addr=f"tcp://h:{replica_id}",
            output_addr=f"tcp://o:{replica_id}",
            status=ReplicaStatus.UP,
            queue_length=load,
        )
        return KeyValue(keys.replica_key("default", 0, replica_id), encode_record(written), replica_id + 1, revision)

    async def list(self) -> None:
        await self._watcher.replace(Listing(self._revision, 1, tuple(self._items)), 0.0)

    async def _put(self, item: KeyValue) -> None:
        await self._watcher.apply(WatchBatch(self._revision, (PutEvent(item),)))

    async def load(self, replica_id: int, load: int) -> None:
        self._revision += 1
        await self._put(self._replica(replica_id, load, self._revision))

    async def beat(self) -> None:
        self._revision += 1
        await self._put(KeyValue(keys.beat_key("default", "h"), b"{}", self._revision, self._revision))

    async def control(self) -> None:
        self._revision += 1
        key = keys.replica_control_key("default", 0, 0)
        await self._put(KeyValue(key, b"{}", self._revision, self._revision))


async def test_a_beat_between_two_loads_leaves_the_short_way_open() -> None:
    """1. replicas are listed; 2. a beat or a control key is written, which is in no view; 3. a load changes."""
    scene = Scene()
    registry = Registry(scene, 3)
    await registry.list()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Membership, "_replace_all", lambda *_, **__: pytest.fail("the long way"))
        for load in range(1, 4):
            await registry.beat()
            await registry.control()
            await registry.load(1, load)
    assert [told[1].queue_length for told in scene.told if told[0] == "renew"] == [1, 2, 3]  # type: ignore[index]


async def test_a_view_that_was_missed_takes_the_long_way() -> None:
    """1. the load of replica 0 changes in a view that is missed; 2. that of replica 1 in the next: both are applied."""
    scene = Scene()
    registry = Registry(scene, 3)
    await registry.list()
    registry.missed = True
    await registry.load(0, 5)
    registry.missed = False
    await registry.beat()
    await registry.load(1, 6)
    assert [info.queue_length for info in scene.membership.members([0])] == [5, 6, 0]


def attached(scene: Scene) -> list[tuple[int, int]]:
    return [(client.info.stage_id, client.info.replica_id) for client in scene.membership.clients.values()]


@pytest.mark.attack("A23")
@pytest.mark.parametrize("is_first_listed", [True, False])
def test_of_two_processes_at_one_address_the_first_serves_on_while_it_answers(
    is_first_listed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """1. a record of stage 0 names the address of 1/0, which is older and answers: it is refused, in whatever order
    2. the log names both; the record may change as often as it likes, 1/0 is told nothing
    3. 1/0 is gone: the address is the other's
    """
    scene, first, second = Scene(), record(1, 0, 5, epoch=3), record(0, 8, 5, epoch=9)
    infos = (first, second) if is_first_listed else (second, first)
    scene.membership.apply(View({(1, 0): first}, revision=1), Delta())
    scene.pools[1].core.session_up("tcp://h:5", 0.0)
    records = {(each.stage_id, each.replica_id): each for each in infos}
    for revision in range(10, 13):
        records[0, 8] = replace(second, queue_length=revision)
        scene.membership.apply(View(dict(records), revision=revision), Delta())
    assert scene.told == [("connect", first)]
    assert attached(scene) == [(1, 0)]
    assert caplog.text.count("its address tcp://h:5 is that of replica 1/0, which answers there") == 1
    del records[1, 0]
    scene.membership.apply(View(dict(records), revision=20), Delta())
    assert attached(scene) == [(0, 8)]


@pytest.mark.attack("H2")
@pytest.mark.parametrize("stage_id", [0, 1])
def test_a_copy_of_a_record_does_not_take_its_place_whatever_stage_it_names(
    stage_id: int, caplog: pytest.LogCaptureFixture
) -> None:
    """1. 0/0 has a session; a copy under another id comes: it is told nothing, and the log names it
    2. a hub that sees both at once tries the copy, until the process has named its epoch
    """
    own, copy = record(0, 0, 5, epoch=3), record(stage_id, 700, 5, epoch=9)
    both = View({(0, 0): own, (stage_id, 700): copy}, revision=2)
    scene = Scene()
    scene.membership.apply(View({(0, 0): own}, revision=1), Delta())
    scene.pools[0].core.session_up("tcp://h:5", 0.0)
    scene.membership.apply(both, Delta())
    assert scene.told == [("connect", own)]
    assert f"replica={stage_id}/700: its address tcp://h:5 is that of replica 0/0, which answers there" in caplog.text
    later = Scene()
    later.membership.apply(both, Delta())
    assert later.told == [("connect", copy)]
    cast(Client, later.membership.clients["tcp://h:5"]).named_epoch = 3
    later.membership.owner_may_change("tcp://h:5")
    assert later.membership.next_review_s == 0.0
    later.membership.review_members()
    assert attached(later) == [(0, 0)]


def test_a_process_that_registers_again_takes_its_own_address_over() -> None:
    """Its former record may still be there, under another id, until the lease has run out."""
    scene, before, after = Scene(), record(0, 0, 5, epoch=3), record(0, 1, 5, epoch=9)
    scene.membership.apply(View({(0, 0): before}, revision=1), Delta())
    scene.membership.apply(View({(0, 0): before, (0, 1): after}, revision=2), Delta())
    assert scene.told == [("connect", before), ("renew", after, False)]


@pytest.mark.attack("A24")
def test_records_of_nobody_take_a_bounded_number_of_connections_and_turns_with_good_ones() -> None:
    """1. of three thousand records only the last ten are of replicas that answer
    2. never are there more clients than the bound allows; all ten are connected to in the end
    """
    scene, good = Scene(), range(2990, 3000)
    records = {(0, each): record(0, each, each, each + 1) for each in range(3000)}
    scene.membership.apply(View(records, revision=1), Delta())
    pool, seen = scene.pools[0].core, set()
    for _ in range(2000):
        assert len(scene.membership.clients) <= MOST_UNANSWERED + len(good)
        for each in good:
            addr = f"tcp://h:{each}"
            if addr in scene.membership.clients and addr not in seen:
                seen.add(addr)
                pool.session_up(addr, scene.now_s)
        due_s = scene.membership.next_review_s
        assert due_s is not None
        scene.now_s = max(scene.now_s + 1.0, due_s)
        scene.membership.review_members()
        if len(seen) == len(good):
            break
    assert len(seen) == len(good)
    assert all(f"tcp://h:{each}" in scene.membership.clients for each in good)


def test_a_replica_that_found_no_descriptor_is_tried_again_without_a_change_of_its_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene, usual = Scene(), Scene.connect_replica_of
    records = {(0, each): record(0, each, each, each + 1) for each in range(3)}

    def fail(_scene: Scene, _info: ReplicaInfo) -> StageClient:
        raise OutOfSocketsError("this hub has no file descriptor left for it (Too many open files)")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scene, "connect_replica_of", fail)
        scene.membership.apply(View(records, revision=1), Delta())
        for _ in range(5):
            due_s = scene.membership.next_review_s
            assert due_s is not None
            scene.now_s = due_s
            scene.membership.review_members()
    assert not scene.membership.clients
    assert "Too many open files" in scene.pools[0].core.members.entries["tcp://h:0"].unusable
    assert caplog.text.count("Too many open files") <= 2
    assert Scene.connect_replica_of is usual
    scene.now_s = scene.membership.next_review_s or 0.0
    scene.membership.review_members()
    assert len(scene.membership.clients) == 3
    assert scene.membership.next_review_s is None


def test_a_replica_that_has_the_port_of_one_that_is_held_keeps_its_client() -> None:
    """1. of two replicas of stage 1, one leaves, and one of stage 0 comes up at its port
    2. the other one leaves, too: a mass loss, both are held; 3. the hold ends: the newcomer has its client
    """
    scene = Scene()
    membership = scene.membership
    first, second, newcomer = record(1, 1, 1, 2), record(1, 3, 3, 4), record(0, 4, 1, 106)
    views = [
        View({(1, 1): first, (1, 3): second}, revision=1),
        View({(0, 4): newcomer, (1, 3): second}, revision=2),
        View({(0, 4): newcomer}, revision=3),
    ]
    membership.apply(views[0], Delta())
    for addr in (first.input_addr, second.input_addr):
        scene.pools[1].core.session_up(addr, 0.0)
    membership.apply(views[1], delta_of(views[0], views[1]))
    membership.apply(views[2], delta_of(views[1], views[2]))
    scene.now_s = 30.0
    for addr in (first.input_addr, second.input_addr):
        scene.pools[1].core.session_down(addr, 30.0)
    while membership.next_review_s is not None and membership.next_review_s <= scene.now_s:
        membership.review_members()
        scene.now_s += 0.5
    assert [client.info.name for client in membership.clients.values()] == ["0/4"]


def test_a_client_that_a_factory_has_made_is_attached_in_a_turn_of_the_loop_of_its_own() -> None:
    """1. as many are connected to as one turn allows; 2. much later a factory brings a client of a former process:
    the present one is connected to at once
    """
    scene, records = Scene(), {(0, each): record(0, each, each, each + 1) for each in range(AT_ONCE)}
    scene.membership.apply(View(records, revision=1), Delta())
    assert len(scene.membership.clients) == AT_ONCE
    scene.now_s = 60.0
    ours = scene.membership.clients.pop("tcp://h:0")
    former = replace(ours.info, output_addr="tcp://o:99")
    scene.membership.attach(former, cast(StageClient, Client(former, scene.told)))
    assert scene.membership.clients["tcp://h:0"].info == ours.info
    assert scene.membership.next_review_s is None


@pytest.mark.attack("Z16")
def test_records_of_thousands_of_strange_stages_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    records = {(stage_id, 0): record(stage_id, 0, stage_id, 1) for stage_id in range(100, 5100)}
    scene.membership.apply(View(records, revision=1), Delta())
    assert caplog.text.count("replica.ignored ") == 32
    assert "replica.unusable_more count=4968" in caplog.text
    scene.now_s = 10.0
    scene.membership.apply(View({**records, (9000, 0): record(9000, 0, 9000, 2)}, revision=2), Delta())
    assert "replica.ignored replica=9000/0" in caplog.text
    assert caplog.text.count("replica.unusable_more") == 1
