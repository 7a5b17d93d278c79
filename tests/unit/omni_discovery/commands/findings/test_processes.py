"""What doctor makes of failures and waits of processes: those of this machine, and those that the registry shows."""

from __future__ import annotations

from omni_discovery.commands.findings.checks import Grade
from omni_discovery.commands.findings.processes import ended_findings, recent_findings, waiting_findings
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.records.waits import HAS_ENDED, WaitEntry, WaitKind, WaitRecord
from omni_discovery.stories import Story, Wait
from omni_discovery.view.table import View

NOW_S = 5000.0


def test_stories_of_the_last_hour_are_shown_with_their_last_lines() -> None:
    old = Story(kind="lease", name="old", pid=1, at_s=100.0, lines=("lost",), endpoints="e:1")
    lines = tuple(str(number) for number in range(30))
    new = Story(kind="request", name="r1", pid=7, at_s=5000.0, lines=lines, registry="a")
    (finding,) = recent_findings([old, new], "a", "e:1", 5060.0)
    assert (finding.grade, finding.topic) == (Grade.NOTE, "recent")
    head, *shown = finding.text.splitlines()
    assert head == "request r1 of process 7, 60 s ago:"
    assert shown == [f"  {number}" for number in range(20, 30)]


def test_a_story_that_repeats_itself_is_shortened() -> None:
    """Of 21 failed renewals the first and the last tell all: when they began, and that they went on."""
    failed = [f"12:00:{second:02} renewal failed: unreachable" for second in range(21)]
    lines = ("11:59:58 held: granted", *failed, "12:00:30 lost: gone")
    (finding,) = recent_findings(
        [Story(kind="lease", name="k", pid=1, at_s=0.0, lines=lines, registry="a")], "a", "", 1.0
    )
    assert [line.strip() for line in finding.text.splitlines()[1:]] == [
        "11:59:58 held: granted",
        failed[0],
        "... 19 more of these",
        failed[-1],
        "12:00:30 lost: gone",
    ]


def test_in_brief_a_story_is_how_it_ended_and_the_last_says_how_to_see_the_rest() -> None:
    """Five stories of ten lines each would push out of a terminal what is wrong now."""

    def story(name: str, *lines: str) -> Story:
        return Story(kind="request", name=name, pid=7, at_s=NOW_S, lines=lines, registry="a")

    first, second = recent_findings([story("r1~1", "began", "x" * 500), story("r2~2")], "a", "", NOW_S, brief=True)
    assert first.text == f"request r1~1 of process 7, 0 s ago: {'x' * 120}..."
    assert (first.advice, second.advice) == ("", "how they came to that: omni doctor --recent")
    assert second.text == "request r2~2 of process 7, 0 s ago:"
    (alone,) = recent_findings([story("r3~3", "refused: why")], "a", "", NOW_S, brief=True)
    assert (alone.text, alone.advice) == ("request r3~3 of process 7, 0 s ago: refused: why", "")


def test_only_stories_of_the_registry_that_is_asked_are_shown() -> None:
    """Two etcds hold a namespace of one name, and this machine's files have stories of both."""

    def story(name: str, registry: str, endpoints: str) -> Story:
        return Story(kind="lease", name=name, pid=1, at_s=NOW_S, lines=(), registry=registry, endpoints=endpoints)

    stories = [
        story("same", "a", "localhost:2379"),
        story("other", "b", "elsewhere:2379"),
        story("wiped", "b", "http://other:1, etcd:2379"),
        story("unknown", "", "elsewhere:2379"),
        story("old release", "", ""),
    ]

    def names(registry: str, endpoints: str = "etcd:2379") -> list[str]:
        found = recent_findings(stories, registry, endpoints, NOW_S)
        return [each.text.removeprefix("lease ").partition(" of ")[0] for each in found]

    assert names("a") == ["same", "wiped"]
    assert names("") == ["wiped"], "no etcd answers: by the endpoints alone"
    assert names("c", "none:1") == []
    embedded = [story("mine", "", "unix:///tmp/a/etcd:2379"), story("another's", "", "unix:///tmp/b/etcd:2379")]
    found = recent_findings(embedded, "", "unix:///tmp/a/etcd:2379", NOW_S)
    assert [each.text.split()[1] for each in found] == ["mine"]


def test_a_process_that_waits_is_wrong_and_one_at_another_etcd_is_told_so() -> None:
    def wait(since_s: float, endpoints: str = "http://etcd:2379") -> Wait:
        return Wait(pid=7, since_s=since_s, who="the supervisor of stage 0", reason="no\npipeline", endpoints=endpoints)

    waits = [wait(NOW_S - 60), wait(NOW_S - 30, "elsewhere:2379"), wait(NOW_S - 0.2)]
    here, there = waiting_findings(waits, [], "h", "other:2379,etcd:2379", NOW_S)
    assert (here.grade, there.grade) == (Grade.PROBLEM, Grade.NOTE)
    assert here.text == "the supervisor of stage 0, process 7 of this machine, waits for 60 s: no pipeline"
    assert "process 7 of this machine, at the etcd elsewhere:2379, waits" in there.text


def test_who_waits_on_another_machine_is_seen_and_nobody_is_told_twice() -> None:
    def shown(host: str, pid: int, since_s: float) -> WaitRecord:
        return WaitRecord(host=host, pid=pid, waits=[WaitEntry(who="the supervisor", reason="no\x1bc", since=since_s)])

    mine = Wait(pid=7, since_s=NOW_S - 60, who="the supervisor", reason="r", endpoints="localhost:2379")
    records = [shown("gpu-1", 7, NOW_S - 60), shown("gpu-2", 7, NOW_S - 90), shown("gpu-1", 8, NOW_S + 9)]
    found = waiting_findings([mine], records, "gpu-1", "127.0.0.1:2379", NOW_S)
    assert [each.grade for each in found] == [Grade.PROBLEM] * 3
    assert [each.text for each in found] == [
        "the supervisor, process 7 on gpu-2, waits for 90 s: no_c",
        "the supervisor, process 7 of this machine, waits for 60 s: r",
        "the supervisor, process 8 on gpu-1, waits for 0 s: no_c",
    ]


def test_why_a_supervisor_has_ended_is_told_until_another_one_runs_there() -> None:
    entry = WaitEntry(
        who="the supervisor of stage 1",
        reason=f"{HAS_ENDED}: no such\nmodel",
        since=NOW_S - 7,
        kind=WaitKind.REFUSED,
        stage_id=1,
    )
    record = WaitRecord(host="gpu-2", pid=8, waits=[entry])

    def view(host: str) -> View:
        return View(replicas={(1, 0): ReplicaInfo("a", "b", 1, ReplicaStatus.STARTING, 0, 0.0, 0.0, 0, host=host)})

    (finding,) = ended_findings([record], view("gpu-1"), NOW_S)
    assert finding.text == "the supervisor of stage 1 on gpu-2 ended 7 s ago: no such model"
    assert (finding.grade, finding.stage_id) == (Grade.PROBLEM, 1)
    assert finding.command == ("omni", "serve", "--headless", "--stage-id", "1")
    assert ended_findings([record], view("gpu-2"), NOW_S) == []
