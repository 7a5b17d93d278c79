"""``omni chaos``: what may be done to whom, and what it takes to begin."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from dataclasses import replace

import pytest

from omni_discovery.commands.chaos.command import ChaosCommand
from omni_discovery.commands.chaos.draw import Act, ChaosStep, draw, lacking, possible_steps, serving
from omni_discovery.commands.chaos.run import Chaos, Times, is_here
from omni_discovery.commands.main import OmniParser
from omni_discovery.errors import ConfigError, OmniError, RegistryDeniedError
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


def test_a_process_of_another_host_or_of_another_kind_is_never_signalled() -> None:
    here = platform.node()
    assert not is_here(info(0, 0, host="elsewhere", pid=os.getpid()))
    assert not is_here(info(0, 0, host=here, pid=1))
    assert not is_here(info(0, 0, host=here, pid=2**22 + 1))
    assert not is_here(info(0, 0, host=here, pid=os.getppid())), "it runs, and is no replica"


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
    with pytest.raises(ConfigError, match="on this host which this user may signal"):
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
