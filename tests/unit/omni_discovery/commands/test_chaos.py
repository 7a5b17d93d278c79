"""``omni chaos``: what may be done to whom, and what it takes to begin."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from omni_discovery.commands.chaos.command import ChaosCommand
from omni_discovery.commands.chaos.draw import Act, ChaosStep, draw, lacking, possible_steps, serving
from omni_discovery.commands.chaos.process import UnsureProcessError, doubt_about, hold_process
from omni_discovery.commands.chaos.run import Chaos, Times
from omni_discovery.commands.main import OmniParser
from omni_discovery.errors import ConfigError, OmniError, RegistryDeniedError
from omni_discovery.processes import process_mark
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaInfo, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.testing import FakeKV, ManualClock

TIMES = Times(for_s=0.0, pause_s=0.0, hold_s=0.0, recovery_s=0.1)


def info(stage_id: int, replica_id: int, **fields: object) -> ReplicaInfo:
    record = ReplicaRecord(
        stage_id=stage_id, replica_id=replica_id, input_addr="in", output_addr="out", status=ReplicaStatus.UP
    )
    return replace(record.to_info(replica_id + 100), **fields)  # type: ignore[arg-type]  # fields of ReplicaInfo


def never(_: ReplicaInfo) -> bool:
    return False


def always(_: ReplicaInfo) -> bool:
    return True


def test_the_last_replica_of_a_stage_is_left_alone() -> None:
    """Stage 0 has one that serves and one that is cordoned; stage 1 has two that serve and one that starts."""
    replicas = [
        info(0, 0),
        info(0, 1, cordoned=True),
        info(1, 0),
        info(1, 1),
        info(1, 2, status=ReplicaStatus.STARTING),
    ]
    found = possible_steps(replicas, list(Act), always)
    assert {(step.replica.stage_id, step.replica.replica_id) for step in found} == {(1, 0), (1, 1)}
    assert len(found) == 2 * len(Act)


def test_elsewhere_a_replica_can_only_be_cordoned() -> None:
    replicas = [info(0, 0), info(0, 1)]
    assert {step.act for step in possible_steps(replicas, list(Act), never)} == {Act.CORDON}
    assert possible_steps(replicas, [Act.KILL, Act.STOP], never) == []


def test_each_act_is_as_likely_as_another() -> None:
    """Ten replicas can be cordoned and one of them killed: half of the draws are kills."""
    replicas = [info(0, number) for number in range(10)]
    found = possible_steps(replicas, [Act.KILL, Act.CORDON], lambda each: each.replica_id == 3)
    assert len(found) == 11
    first: Callable[[int], int] = lambda below: 0  # noqa: E731
    last: Callable[[int], int] = lambda below: below - 1  # noqa: E731
    assert draw(found, first) == ChaosStep(Act.CORDON, replicas[0])
    assert draw(found, last) == ChaosStep(Act.KILL, replicas[3])


def test_a_killed_replica_is_not_back_because_its_lease_has_not_ended() -> None:
    before = serving([info(0, 0), info(0, 1)])
    dead = {(0, 1, info(0, 1).epoch)}
    assert lacking(before, [info(0, 0), info(0, 1)], set()) == {}
    assert lacking(before, [info(0, 0), info(0, 1)], dead) == {0: 1}
    assert lacking(before, [info(0, 0), info(0, 1, epoch=500)], dead) == {}
    assert lacking(before, [], dead) == {0: 2}


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is called as a replica is, for who reads no more than that."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()", "stage_runtime", "--replica", "--namespace", "n"], stdin=subprocess.PIPE
    ) as started:
        yield started
        started.kill()


def record_of(child: subprocess.Popen[bytes], **fields: object) -> ReplicaInfo:
    known = {"host": platform.node(), "pid": child.pid, "process": process_mark(child.pid)}
    return info(0, 0, **{**known, **fields})


def test_a_replica_of_this_host_is_signalled(child: subprocess.Popen[bytes]) -> None:
    with hold_process(record_of(child), "n") as held:
        assert held.send(signal.SIGTERM)
    assert child.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("part", range(4))
def test_a_process_that_is_not_surely_the_replicas_is_never_signalled(
    child: subprocess.Popen[bytes], part: int
) -> None:
    """One of an earlier boot, another container, another id, or one that had the id before: its words are the same."""
    parts = process_mark(child.pid).split("/")
    parts[part] = f"{parts[part]}0"
    found = record_of(child, process="/".join(parts))
    assert "is another one" in doubt_about(found, "n")
    with pytest.raises(UnsureProcessError), hold_process(found, "n"):
        pytest.fail("it is held")
    assert child.poll() is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"host": "elsewhere"}, "runs on host elsewhere"),
        ({"host": ""}, "not told"),
        ({"process": ""}, "an older release wrote it"),
        ({"pid": 1}, "no replica is process 1"),
        ({"pid": 2**22 + 1}, "there is no process"),
    ],
)
def test_it_says_why_a_replica_gets_no_signal(
    child: subprocess.Popen[bytes], fields: dict[str, object], said: str
) -> None:
    assert said in doubt_about(record_of(child, **fields), "n")


def test_a_program_that_is_no_replica_is_never_signalled() -> None:
    """Who may write records could name it, with all that is known of it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert "is no replica" in doubt_about(record_of(other), "n")
        assert other.poll() is None
        other.kill()


@pytest.mark.attack("V5")
@pytest.mark.parametrize("words", [["--namespace", "production"], ["--namespace"], [], ["--namespace", "nn", "n"]])
def test_a_replica_of_another_namespace_is_never_signalled(words: list[str]) -> None:
    """Who may write records of a staging deployment could name it: all that tells it apart is in /proc."""
    command = [sys.executable, "-c", "input()", "stage_runtime", "--replica", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
        assert "is no replica of namespace 'n'" in doubt_about(record_of(other), "n")
        assert other.poll() is None
        other.kill()


#: Forks a process that leads a session, as a replica does, and that one another, as an engine may.
_FORKS = """
import os, sys
def fork(then):
    if not (pid := os.fork()):
        then()
        sys.stdin.read()
        os._exit(0)
    print(pid, flush=True)
fork(lambda: (os.setsid(), fork(lambda: None)))
sys.stdin.read()
"""


@pytest.mark.attack("Z23")
def test_the_process_that_replicas_are_forked_from_is_never_signalled() -> None:
    """It is called as they are, and all end with it: who may write records could name it, or a process of an engine."""
    command = [sys.executable, "-c", _FORKS, "stage_runtime", "--zygote", "1", "{}", "--namespace", "n"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as zygote:
        assert zygote.stdout is not None
        said = {int(zygote.stdout.readline()) for _ in range(2)}
        mine = {pid for pid in said if os.getsid(pid) == pid}
        for pid in (zygote.pid, *said):
            found = info(0, 0, host=platform.node(), pid=pid, process=process_mark(pid))
            doubt = f"process {pid} is what replicas are forked from, or a part of one"
            assert doubt_about(found, "n") == ("" if pid in mine else doubt)
        assert len(mine) == 1


def test_what_takes_the_process_id_after_the_replicas_end_gets_no_signal(child: subprocess.Popen[bytes]) -> None:
    with hold_process(record_of(child), "n") as held:
        child.kill()
        child.wait(20)
        assert not held.send(signal.SIGKILL)


def test_an_ended_process_that_is_not_reaped_yet_has_no_mark(child: subprocess.Popen[bytes]) -> None:
    found = record_of(child)
    assert found.process
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_mark(child.pid) == ""
    assert doubt_about(found, "n")


def parsed(*words: str) -> argparse.Namespace:
    parser, command = OmniParser(), ChaosCommand()
    command.add_arguments(parser)
    return parser.parse_args(list(words))


def test_a_namespace_of_the_environment_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_NAMESPACE", "production")
    with pytest.raises(OmniError, match="--namespace"):
        parsed("--yes")
    assert parsed("--namespace", "staging").namespace == "staging"


@pytest.mark.parametrize("flag", ["--for", "--pause", "--hold", "--recovery"])
@pytest.mark.parametrize("value", ["-1", "nan", "3601"])
def test_it_is_bounded_in_time(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ChaosCommand().run(parsed("--namespace", "staging", "--yes", flag, value))


async def registered(*replicas: ReplicaInfo, kv: FakeKV | None = None) -> FakeKV:
    kv = kv or FakeKV(ManualClock())
    for each in replicas:
        record = ReplicaRecord(
            stage_id=each.stage_id, replica_id=each.replica_id, input_addr="in", output_addr="out", status=each.status
        )
        await kv.put(keys.replica_key("n", each.stage_id, each.replica_id), encode_record(record))
    return kv


async def test_without_yes_it_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    kv = await registered(info(0, 0), info(0, 1))
    before = (await kv.list(keys.namespace_prefix("n"))).revision
    await Chaos(kv, "n", [Act.CORDON], TIMES).show()
    said = capsys.readouterr().out
    assert "could cordon replica=0/0" in said
    assert "add --yes" in said
    assert (await kv.list(keys.namespace_prefix("n"))).revision == before


async def test_where_nothing_can_be_done_it_says_why() -> None:
    kv = await registered(info(0, 0), info(1, 0))
    with pytest.raises(ConfigError, match="the last one of a stage is left alone"):
        await Chaos(kv, "n", list(Act), TIMES).run(1)
    kv = await registered(info(0, 0), info(0, 1))
    with pytest.raises(ConfigError, match=r"on this host which this user may signal: 0/0: .*\(not told\)"):
        await Chaos(kv, "n", [Act.KILL], TIMES).run(1)


class DenyingKV(FakeKV):
    """As etcd for who is no operator: reads are allowed, deletes are not, whatever their condition."""

    async def delete(self, key: str, mod_revision: int = 0) -> bool:
        raise RegistryDeniedError("localhost", f"permission denied: delete {key}")


async def test_who_is_no_operator_does_nothing() -> None:
    kv = await registered(info(0, 0), info(0, 1), kv=DenyingKV(ManualClock()))
    with pytest.raises(RegistryDeniedError):
        await Chaos(kv, "n", [Act.CORDON], TIMES).run(1)
    assert await kv.get(keys.replica_control_key("n", 0, 0)) is None
    assert await kv.get(keys.replica_control_key("n", 0, 1)) is None
