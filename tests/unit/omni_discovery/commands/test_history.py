"""Who was up when: from the registry's events, from a hub's log, and from both."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from omni_discovery.commands.history import (
    RegistryPast,
    heading,
    history_table,
    hub_history_table,
    merge,
    newest,
    read_registry,
    reasons,
)
from omni_discovery.commands.history_log import (
    EventReader,
    HistoryLog,
    HubLife,
    HubTransition,
    Life,
    Transition,
    history_file,
    lives,
    read_log,
)
from omni_discovery.kv import DeleteEvent, KeyValue, PutEvent, WatchEvent
from omni_discovery.records import keys
from omni_discovery.records.schema import (
    DRAINED_BY_OPERATOR,
    HubRecord,
    ReplicaInfo,
    ReplicaRecord,
    ReplicaStatus,
    encode_record,
)
from omni_discovery.testing import FakeKV, ManualClock
from omni_discovery.view.table import Delta, View

KEY = keys.replica_key("n", 0, 1)


def value(status: ReplicaStatus, at_s: float, **fields: Any) -> bytes:
    record = ReplicaRecord(
        stage_id=0,
        replica_id=1,
        input_addr="in",
        output_addr="out",
        status=status,
        registered_at=100.0,
        updated_at=at_s,
        host="gpu-7",
        pid=42,
        **fields,
    )
    return encode_record(record)


def put(status: ReplicaStatus, at_s: float, revision: int, epoch: int = 5, **fields: Any) -> PutEvent:
    return PutEvent(KeyValue(KEY, value(status, at_s, **fields), epoch, revision, 1))


def read(*events: WatchEvent) -> list[Transition]:
    reader = EventReader("n")
    every = [transition for event in events for transition in reader.read_event(event)]
    return [transition for transition in every if isinstance(transition, Transition)]


def logged(file: Path) -> list[Transition]:
    return [transition for transition in read_log(file) if isinstance(transition, Transition)]


STARTS = put(ReplicaStatus.STARTING, 100.0, 5)
IS_UP = put(ReplicaStatus.UP, 103.0, 6)
BUSY = put(ReplicaStatus.UP, 110.0, 7, queue_length=3)
WITHDRAWS = put(ReplicaStatus.DOWN, 120.0, 8)
GONE = DeleteEvent(KEY, 9)


def test_only_what_changes_a_life_is_told_not_each_new_load() -> None:
    assert [each.what for each in read(STARTS, IS_UP, BUSY, WITHDRAWS, GONE)] == [
        "registered",
        "starting",
        "up",
        "down",
        "gone",
    ]


def test_a_life_that_withdrew_and_one_that_was_lost() -> None:
    (life,) = lives(read(STARTS, IS_UP, WITHDRAWS, GONE))
    assert (life.registered_at_s, life.up_at_s, life.seen_at_s, life.is_gone) == (100.0, 103.0, 120.0, True)
    assert (life.end, life.host, life.pid) == ("stopped", "gpu-7", 42)
    assert [life.end for life in lives(read(STARTS, IS_UP, GONE))] == ["lost"]
    failed = put(ReplicaStatus.ERROR, 105.0, 7, reason="the engine died")
    assert [life.end for life in lives(read(STARTS, IS_UP, failed, GONE))] == ["failed: the engine died"]
    withdrew = put(ReplicaStatus.DOWN, 106.0, 8, reason="the engine died")
    assert [life.end for life in lives(read(STARTS, IS_UP, withdrew, GONE))] == ["failed: the engine died"]


def test_two_lives_of_one_key_are_two_also_if_the_end_of_the_first_was_compacted() -> None:
    first, second = lives(read(IS_UP, put(ReplicaStatus.UP, 203.0, 20, epoch=19)))
    assert (first.epoch, second.epoch) == (5, 19)


def test_a_drain_by_an_operator_is_told_from_a_stop_and_from_a_failure() -> None:
    asked = put(ReplicaStatus.DRAINING, 110.0, 7, reason=DRAINED_BY_OPERATOR)
    drained = put(ReplicaStatus.DOWN, 120.0, 8, reason=DRAINED_BY_OPERATOR)
    assert [life.end for life in lives(read(IS_UP, asked, drained, GONE))] == ["drained by an operator"]
    stopped = put(ReplicaStatus.DRAINING, 110.0, 7)
    assert [life.end for life in lives(read(IS_UP, stopped, WITHDRAWS, GONE))] == ["stopped"]
    assert [life.end for life in lives(read(IS_UP, asked, GONE))] == ["lost while draining"]


def test_values_that_can_not_be_read_and_keys_of_others_are_passed_over() -> None:
    nonsense = PutEvent(KeyValue(KEY, b"{", 5, 7, 1))
    beat = PutEvent(KeyValue("/omni/v1/n/beats/h", b"x", 8, 8, 1))
    assert read(nonsense, beat, DeleteEvent("/omni/v1/n/replicas/0/1/x", 9), GONE) == []


def test_the_log_knows_the_moment_of_an_end_that_the_registry_only_knows_to_have_come() -> None:
    """1. etcd tells of the delete, without a time; 2. the hub's log has the time; 3. in any order the same life."""
    from_etcd = read(STARTS, IS_UP, GONE)
    from_log = [Transition(stage_id=0, replica_id=1, epoch=5, what="gone", at_s=131.0)]
    (life,) = lives(from_etcd + from_log)
    assert life.gone_at_s == 131.0
    assert lives(from_log + from_etcd) == [life]


def info(epoch: int = 5, status: ReplicaStatus = ReplicaStatus.UP, **fields: Any) -> ReplicaInfo:
    made = ReplicaInfo("in", "out", 0, status, 0, 103.0, 100.0, replica_id=1, epoch=epoch, host="gpu-7", pid=42)
    return replace(made, **fields)


def test_who_is_registered_now_is_not_gone_and_who_is_not_is() -> None:
    found = lives(read(STARTS, IS_UP), [info(epoch=77)])
    assert [(life.epoch, life.is_gone) for life in found] == [(5, True), (77, False)]


def test_an_epoch_that_comes_again_on_a_fresh_etcd_is_another_life(tmp_path: Path) -> None:
    """1. a replica was lost; 2. etcd begins anew, and another process gets the same id and epoch; 3. two lives"""
    file = history_file(tmp_path / "omni", "n")
    log = HistoryLog(file)
    log.append_changes(View(changed_at=150.0), Delta(added=(info(),)))
    log.append_changes(View(changed_at=160.0), Delta(removed=(info(),)))
    later = info(pid=43)
    HistoryLog(file).append_changes(View(changed_at=300.0), Delta(added=(later,)))
    assert [(life.pid, life.end) for life in lives(logged(file), [later])] == [(42, "lost"), (43, "")]
    log.append_changes(View(changed_at=310.0), Delta(updated=(replace(later, pid=44),)))
    assert [(life.pid, life.registered_at_s) for life in lives(logged(file))][-1] == (44, 100.0)


def test_a_reason_of_several_lines_is_one_line_of_the_table() -> None:
    failed = put(ReplicaStatus.ERROR, 105.0, 7, reason="the engine died:\n  out of memory\n")
    assert [life.end for life in lives(read(STARTS, failed, GONE))] == ["failed: the engine died: out of memory"]


def test_a_hub_writes_what_changes_and_reads_it_back(tmp_path: Path) -> None:
    """1. a replica appears, its load changes, it drains, it goes; 2. four things are written; 3. one life is read."""
    file = history_file(tmp_path / "omni", "n")
    log = HistoryLog(file)
    view = View(changed_at=150.0)
    log.append_changes(view, Delta(added=(info(status=ReplicaStatus.STARTING),)))
    log.append_changes(view, Delta(updated=(info(),)))
    log.append_changes(view, Delta(updated=(info(queue_length=9),)))
    log.append_changes(view, Delta(removed=(info(),)))
    assert [each.what for each in logged(file)] == ["registered", "starting", "up", "gone"]
    (life,) = lives(logged(file))
    assert (life.up_at_s, life.gone_at_s, life.end) == (103.0, 150.0, "lost")


def test_the_log_stays_within_its_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    log = HistoryLog(tmp_path / "n.history.jsonl", most_bytes=2000)
    for epoch in range(1, 200):
        log.append_changes(View(changed_at=1.0), Delta(added=(info(epoch=epoch),)))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 5000
    assert max(each.epoch for each in logged(tmp_path / "n.history.jsonl")) == 199


def test_a_log_that_can_not_be_written_holds_nobody_up_and_broken_lines_are_left_out(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("x")
    HistoryLog(in_the_way / "n.history.jsonl").append_changes(View(), Delta(added=(info(),)))
    broken = tmp_path / "n.history.jsonl"
    broken.write_bytes(b'{"half": \n\xff\xfe\n[]\n')
    assert list(read_log(broken)) == []


async def test_what_the_registry_remembers_is_read_from_its_oldest_revision_on() -> None:
    """1. a life begins and ends, another begins: both are read
    2. the history is compacted: the one that is there now is left
    """
    kv = FakeKV(ManualClock())
    await kv.put(KEY, value(ReplicaStatus.UP, 103.0))
    await kv.delete(KEY)
    await kv.put(KEY, value(ReplicaStatus.UP, 203.0))
    past = await read_registry(kv, "n")
    assert [life.is_gone for life in merge(past, [])[0]] == [True, False]
    assert (past.oldest, past.registry) == (1, "1")
    kv.compact()
    past = await read_registry(kv, "n")
    assert [life.is_gone for life in merge(past, [])[0]] == [False]
    assert past.oldest > 1


@pytest.mark.attack("Y2")
async def test_of_a_past_that_is_too_long_the_newest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. a replica writes its key more often than is read, and others come and go
    2. the others' newest lives are read whole, and it is said from where on
    """
    monkeypatch.setattr("omni_discovery.commands.history._MOST_CHANGES", 1000)
    kv = FakeKV(ManualClock())
    await kv.put(KEY, value(ReplicaStatus.UP, 103.0))
    await kv.delete(KEY)
    for number in range(1500):
        await kv.put(
            keys.replica_key("n", 0, 2),
            value(ReplicaStatus.UP, float(number)).replace(b'"replica_id":1', b'"replica_id":2'),
        )
    await kv.put(KEY, value(ReplicaStatus.UP, 203.0))
    await kv.delete(KEY)
    past = await read_registry(kv, "n")
    assert not past.is_whole
    assert (past.oldest, past.read_from) == (1, 1506 - 128 - 256 - 512)
    assert [(life.replica_id, life.is_gone) for life in merge(past, [])[0]] == [(2, False), (1, True)]
    assert f"read from revision {past.read_from} on" in heading("n", past, 2)
    kv.compact()
    assert (await read_registry(kv, "n")).is_whole


@pytest.mark.attack("Y2")
async def test_a_past_that_is_too_long_in_one_moment_is_said_not_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_discovery.commands.history._MOST_S", 0.0)
    kv = FakeKV(ManualClock())
    await kv.put(KEY, value(ReplicaStatus.UP, 103.0))
    past = await read_registry(kv, "n")
    assert (past.is_whole, past.transitions) == (False, [])
    assert [life.is_gone for life in merge(past, [])[0]] == [False]


def test_lives_that_go_on_are_shown_before_those_that_have_ended() -> None:
    lived = [Life(0, number, 5, is_gone=number != 1) for number in range(6)]
    assert [life.replica_id for life in newest(lived, 3)] == [1, 4, 5]
    assert newest(lived, 9) == lived
    assert history_table(lived, 3, 1000.0).caption == "3 older ones that ended are not shown; see --limit and --json"


HUB = HubRecord(hub_id="front-1", host="front", pid=7, started_at=50.0, version="0.2")


async def test_hubs_have_lives_too() -> None:
    """1. a hub registers, renews its record and goes; 2. another is there: both are told, the first as ended"""
    kv, key = FakeKV(ManualClock()), keys.hub_key("n", "front-1")
    await kv.put(key, encode_record(HUB))
    await kv.put(key, encode_record(HUB))
    await kv.put(keys.hub_key("n", "bad"), b"{")
    await kv.delete(key)
    await kv.put(keys.hub_key("n", "front-2"), encode_record(HubRecord(hub_id="front-2", pid=8, started_at=60.0)))
    past = await read_registry(kv, "n")
    _, (first, second), _ = merge(past, [])
    assert (first.hub_id, first.pid, first.started_at_s, first.end) == ("front-1", 7, 50.0, "stopped or lost")
    assert (second.hub_id, second.is_gone, second.end) == ("front-2", False, "")
    stop = HubTransition(
        hub_id="front-1", what="stopped", at_s=99.0, host="front", pid=7, started_at=50.0, registry="1"
    )
    _, (first, _), _ = merge(past, [stop])
    assert (first.gone_at_s, first.end) == (99.0, "stopped")


def test_a_hub_writes_which_hubs_come_and_go_and_its_own_stop(tmp_path: Path) -> None:
    file = history_file(tmp_path / "omni", "n")
    log, other = HistoryLog(file), HubRecord(hub_id="front-2", pid=8, started_at=60.0)
    log.append_changes(View(changed_at=1.0, cluster_id=255, hubs={"front-1": HUB}), Delta(hubs_changed=True))
    both = {"front-1": HUB, "front-2": other}
    log.append_changes(View(changed_at=2.0, cluster_id=255, hubs=both), Delta(hubs_changed=True))
    log.append_changes(View(changed_at=3.0, cluster_id=255, hubs=both), Delta(added=(info(),)))
    log.append_changes(View(changed_at=4.0, cluster_id=255, hubs={"front-1": HUB}), Delta(hubs_changed=True))
    log.append_stop(HUB, 9.0)
    written = [each for each in read_log(file) if isinstance(each, HubTransition)]
    assert [(each.hub_id, each.what, each.at_s) for each in written] == [
        ("front-1", "registered", None),
        ("front-2", "registered", None),
        ("front-2", "gone", 4.0),
        ("front-1", "stopped", 9.0),
    ]
    assert {each.registry for each in read_log(file)} == {"ff"}


def test_lives_of_another_registry_are_left_out_and_counted(tmp_path: Path) -> None:
    """1. a user's hub had an embedded etcd; 2. today's has another: its lives are alone, the others can be asked for

    3. a line of an older release, which names no registry, counts for a life that etcd knows
    """
    file = history_file(tmp_path / "omni", "n")
    HistoryLog(file).append_changes(
        View(changed_at=1.0, cluster_id=1, hubs={"front-1": HUB}), Delta(added=(info(epoch=3),), hubs_changed=True)
    )
    HistoryLog(file).append_changes(View(changed_at=2.0, cluster_id=2), Delta(added=(info(),)))
    unnamed = Transition(stage_id=0, replica_id=1, epoch=5, what="gone", at_s=131.0, host="gpu-7", pid=42)
    stranger = Transition(stage_id=9, replica_id=9, epoch=5, what="gone", at_s=131.0, host="gpu-7", pid=42)
    log = [*read_log(file), unnamed, stranger]
    past = RegistryPast("2", read(IS_UP, GONE), [], [], 1, 1)
    replicas, hubs, others = merge(past, log)
    assert ([(life.epoch, life.gone_at_s) for life in replicas], hubs, others) == ([(5, 131.0)], [], 3)
    replicas, hubs, others = merge(past, log, every=True)
    assert ({(life.epoch, life.registry) for life in replicas if not life.stage_id}, len(hubs), others) == (
        {(3, "1"), (5, "2")},
        1,
        0,
    )


def printed(table: Any, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def column(lines: list[str], name: str) -> str:
    """The texts of one column, which may go on over several lines."""
    (head,) = (line for line in lines if name in line)
    start = head.index(name)
    after = [at for at in range(start, len(head)) if head[at:].startswith("  ") and head[at:].strip()]
    end = len(head) - len(head[after[0] :].lstrip()) if after else None
    return " ".join("\n".join(line[start:end] for line in lines[lines.index(head) + 2 :]).split())


def test_the_table_has_dates_and_fits_and_the_reasons_below_it_are_whole() -> None:
    why = "the engine died: " + "no memory " * 40
    failed = Life(
        10, 100, 123_456, "a-host-with-a-long-name.rack-4", 4_194_303, 1.0, 5.0, 9.0, None, True, "error", why
    )
    drained = Life(0, 1, 7, "h", 2, 1.0, 5.0, 9.0, 10.0, True, "down", DRAINED_BY_OPERATOR)
    now_s = 40 * 86_400.0
    lines = printed(history_table([failed, drained], 40, now_s))
    assert all(len(line) <= 80 for line in lines), lines
    text = "\n".join(lines)
    assert text.count("Jan 01") + text.count("Dec 31") == 4
    assert "…" not in text
    assert column(lines, "end").startswith("failed")
    assert column(lines, "end").endswith("drained by an operator")
    assert "a-host-with-a-long-name.rack-4:4194303" in column(lines, "process").replace(" ", "")
    assert "after Jan 01" in text or "after Dec 31" in text
    assert list(reasons([failed, drained])) == [f"10/100 of epoch 123456 failed: {why.strip()}"]
    starting = Life(0, 1, 8, "h", 2, 1.0, None, 9.0, 10.0, True, "starting")
    assert column(printed(history_table([starting, failed], 40, now_s)), "end") == "lost while starting failed"
    hub = merge(RegistryPast("1", [], [], [HUB], 1, 1), [])[1]
    lines = printed(hub_history_table(hub, 40, now_s))
    assert all(len(line) <= 80 for line in lines), lines
    assert "front-1" in "\n".join(lines)
    assert "live" in "\n".join(lines)


def test_the_table_takes_lives_of_which_little_is_known() -> None:
    table = history_table([Life(0, 1, 5), Life(0, 1, 6, is_gone=True)], 40, 1000.0)
    assert table.row_count == 2
    assert history_table([], 40, 1000.0).caption is not None


TRANSITIONS = st.builds(
    Transition,
    stage_id=st.integers(0, 1),
    replica_id=st.integers(0, 1),
    epoch=st.integers(1, 3),
    what=st.sampled_from(["registered", "up", "down", "gone", "error", "something new"]),
    at_s=st.none() | st.floats(0, 1e6),
)


@given(st.lists(TRANSITIONS, max_size=12))
def test_any_transitions_make_one_life_for_each_epoch(transitions: list[Transition]) -> None:
    found = lives(transitions)
    ids = [(life.stage_id, life.replica_id, life.epoch) for life in found]
    assert sorted(ids) == sorted({(each.stage_id, each.replica_id, each.epoch) for each in transitions})
    assert all(life.is_gone for life in found)


def test_the_heading_breaks_between_its_parts_where_the_window_is_narrow() -> None:
    past = RegistryPast("1f2e3d4c5b6a7988", [], [], [], 12345, 12345)
    whose, since = "namespace omni · registry 1f2e3d4c5b6a7988 · 12 lives", "etcd remembers from revision 12345"
    assert heading("omni", past, 12, 80).splitlines() == [whose, since]
    assert heading("omni", past, 12, 120) == f"{whose} · {since}"
    assert " · 1 life · " in heading("omni", past, 1, 120)


@pytest.mark.attack("D4")
@pytest.mark.parametrize("at_s", [1e308, -1e308, 1e18, 1e17, -1e10])
def test_a_time_that_no_calendar_has_is_a_question_mark(at_s: float) -> None:
    now_s = 1_700_000_000.0
    common: dict[str, Any] = {"stage_id": 0, "replica_id": 1, "epoch": 7, "registered_at_s": at_s, "up_at_s": at_s}
    shown = [
        Life(**common, seen_at_s=at_s, is_gone=True),
        Life(**common, gone_at_s=at_s, is_gone=True),
        Life(**common, last_status="up"),
    ]
    hubs = [HubLife(hub_id="h", started_at_s=at_s, gone_at_s=at_s, is_gone=True)]
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(history_table(shown, 9, now_s))
        console.print(hub_history_table(hubs, 9, now_s))
    lines = [line.split() for line in captured.get().splitlines() if line.split()[:1] in (["0/1"], ["h"])]
    # The first three columns of a replica are its name, its epoch, and its process, which is not known here.
    assert [line.count("?") for line in lines] == [2, 2, 1, 2], lines
