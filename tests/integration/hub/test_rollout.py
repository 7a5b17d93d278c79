"""A new deploy document is rolled out under load: no error, and no request that two versions have had."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from hub.async_omni import AsyncOmni
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.deploy.document import DeployConfig, encode_deploy
from omni_discovery.deploy.fingerprint import stage_fingerprints
from omni_discovery.errors import StageUnavailableError
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.table import Delta
from tests.support.hub_fakes import (
    QUICK,
    FakeReplica,
    accept_only,
    collect,
    deploy_of,
    picture,
    text_of,
    until,
    view_of,
)
from tests.support.local_replica import LocalReplica


def document(first: str, second: str) -> DeployConfig:
    return deploy_of(f"""
    stages:
      - {{stage_id: 0, engine: echo, model: {first}, final_output: text}}
      - {{stage_id: 1, engine: echo, model: {second}, final_output: text}}
    """)


OLD, NEW = document("old", "old"), document("new", "new")


class Registry:
    """What one hub sees, changed step by step."""

    def __init__(self, omni: AsyncOmni) -> None:
        self.omni = omni
        self.infos: dict[str, ReplicaInfo] = {}
        self.pipeline = encode_deploy(OLD)

    def show(self) -> None:
        view = replace(view_of(self.infos.values()), pipeline=self.pipeline)
        self.omni.apply_view(view, Delta())

    async def applied(self) -> None:
        """What was shown is applied: after a view the hub may rest for a quarter of a second."""
        await asyncio.sleep(0.3)

    def apply(self, deploy: DeployConfig) -> None:
        self.pipeline = encode_deploy(deploy)
        self.show()

    def add(self, info: ReplicaInfo, deploy: DeployConfig, **fields: Any) -> ReplicaInfo:
        fingerprint = stage_fingerprints(deploy)[info.stage_id]
        info = self.infos[info.input_addr] = replace(info, **{"fingerprint": fingerprint, **fields})
        self.show()
        return info

    async def add_serving(self, info: ReplicaInfo, deploy: DeployConfig) -> None:
        self.add(info, deploy)
        await until(lambda: self.omni.releases.every.answers(info.stage_id, info.input_addr))

    def drain(self, info: ReplicaInfo) -> None:
        self.infos[info.input_addr] = replace(self.infos[info.input_addr], status=ReplicaStatus.DRAINING)
        self.show()

    def remove(self, info: ReplicaInfo) -> None:
        del self.infos[info.input_addr]
        self.show()

    def figure(self, line: str) -> float:
        """One figure of the hub's metrics, by all that stands before its value."""
        lines = generate_latest(self.omni.metrics).decode().splitlines()
        return next(float(each.removeprefix(line)) for each in lines if each.startswith(f"{line} "))


@asynccontextmanager
async def hub_of(deploy: DeployConfig, keys: KeyPair | None = None) -> AsyncIterator[Registry]:
    omni = AsyncOmni(deploy, "hub-1", keys or KeyPair.generate(), QUICK)
    await omni.start()
    try:
        yield Registry(omni)
    finally:
        await omni.close()


@asynccontextmanager
async def fakes_of(*replicas: FakeReplica) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for replica in replicas:
            replica.kill()


class Load:
    """Clients that ask one request after the other; notes which replicas each has had."""

    def __init__(self, omni: AsyncOmni, clients: int) -> None:
        self._omni = omni
        self._stopping = False
        self.had: list[set[str]] = []
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(clients)]

    async def _ask(self) -> None:
        while not self._stopping:
            outputs = await collect(self._omni.generate({"prompt": "one two three"}))
            assert text_of(outputs).split() == ["one", "two", "threeone", "two", "three"]
            self.had.append({output.replica for output in outputs if output.replica})

    async def more(self, count: int) -> None:
        """Wait until so many further requests are done."""
        wanted = len(self.had) + count
        await until(lambda: len(self.had) >= wanted or any(task.done() for task in self._tasks), 30.0)

    async def stop(self) -> None:
        """End them. Raise what any of them was told."""
        self._stopping = True
        await asyncio.gather(*self._tasks)


def versions(replicas: Iterable[str]) -> set[str]:
    """Replicas of the new version have ids from 10 on."""
    return {"new" if int(name.partition("/")[2]) >= 10 else "old" for name in replicas}


async def test_replicas_are_replaced_under_load_without_an_error_and_no_request_has_two_versions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. two replicas of each stage serve; the new document is applied, and nothing changes yet
    2. one of each stage is replaced: requests go by either document
    3. the first stage's other one is replaced, and when nothing goes by the old document any more, the second's
    4. a stray replica of a third document is listed all the while, and never picked
    """
    keys = KeyPair.generate()
    made: dict[tuple[int, int], LocalReplica] = {}
    with ExitStack() as stack:
        for stage_id, replica_id in itertools.product((0, 1), (0, 1, 10, 11, 99)):
            if replica_id == 99 and stage_id == 1:
                continue
            replica = LocalReplica(
                {keys.public: "hub-1"}, stage_id=stage_id, replica_id=replica_id, deploy=OLD, capacity=4, delay_s=0.002
            )
            made[stage_id, replica_id] = stack.enter_context(replica)
        async with hub_of(OLD, keys) as registry:
            for stage_id, replica_id in itertools.product((0, 1), (0, 1)):
                await registry.add_serving(made[stage_id, replica_id].info, OLD)
            await registry.add_serving(made[0, 99].info, document("stray", "stray"))
            load = Load(registry.omni, 6)
            await load.more(20)
            registry.apply(NEW)
            await load.more(20)
            assert versions(set().union(*load.had)) == {"old"}

            async def replace_by(stage_id: int, before: int, after: int) -> None:
                await registry.add_serving(made[stage_id, after].info, NEW)
                leaving = made[stage_id, before]
                registry.drain(leaving.info)
                await until(lambda: leaving.server.queue_length == 0, 10.0)
                await load.more(5)
                registry.remove(leaving.info)
                await load.more(20)

            await replace_by(0, 0, 10)
            assert versions(set().union(*load.had)) == {"old"}, "nobody serves the new second stage"
            await replace_by(1, 0, 10)
            await replace_by(0, 1, 11)
            await until(lambda: registry.figure("omni_hub_requests_on_older_pipelines") == 0, 10.0)
            await replace_by(1, 1, 11)
            await load.more(20)
            assert registry.figure('omni_hub_replicas_refused{stage="0"}') == 1
            await load.stop()
    assert [had for had in load.had if len(versions(had)) != 1] == []
    assert versions(load.had[-1]) == {"new"}
    assert {name for had in load.had for name in had} == {
        *("0/0", "0/1", "1/0", "1/1"),
        *("0/10", "0/11", "1/10", "1/11"),
    }
    refused = [record.getMessage() for record in caplog.records if "replica.refused" in record.getMessage()]
    assert len(refused) == 1, refused
    assert "replica=0/99" in refused[0]
    assert "another deploy document" in refused[0]


async def test_requests_that_wait_for_their_first_replica_move_to_the_new_version_when_the_old_is_gone() -> None:
    """1. the only replica of the old version is full: one request runs there, another waits
    2. the new version comes up, and the old one drains: the one that waits is served by the new one
    """
    first, second = FakeReplica(accept_only), FakeReplica(picture, 1)
    newer, painter = FakeReplica(replica_id=10), FakeReplica(picture, 1, 10)
    async with fakes_of(first, second, newer, painter), hub_of(OLD) as registry:
        for replica in (first, second):
            await registry.add_serving(replica.info, OLD)
        running = asyncio.create_task(collect(registry.omni.generate({"prompt": "one"})))
        await until(lambda: len(first.of(wire.Submit)) == 1)
        first_pool = registry.omni.releases.newest.pools[0]
        registry.infos[first.info.input_addr] = replace(registry.infos[first.info.input_addr], weight=0.0)
        registry.show()
        await registry.applied()
        waiting = asyncio.create_task(collect(registry.omni.generate({"prompt": "two"})))
        await until(lambda: len(first_pool.core.queue) == 1)
        registry.apply(NEW)
        await registry.add_serving(newer.info, NEW)
        await registry.add_serving(painter.info, NEW)
        outputs = await waiting
        assert {output.replica for output in outputs if output.replica} == {"0/10", "1/10"}
        (submit,) = first.of(wire.Submit)
        first.done(submit, 0)
        assert {output.replica for output in await running if output.replica} == {"0/0", "1/0"}


@pytest.mark.parametrize("first_is_same", [True, False])
async def test_what_a_stage_has_begun_goes_on_by_a_document_that_says_the_same_of_it_or_not_at_all(
    first_is_same: bool,
) -> None:
    """1. a request is at the first stage; the second stage's replica of its version goes, one of a new version is there
    2. with the first stage as before, the request goes on to the new one; else it fails with the reason
    """
    first, second, painter = FakeReplica(accept_only), FakeReplica(picture, 1), FakeReplica(picture, 1, 10)
    newer = FakeReplica(replica_id=10)
    new = document("old" if first_is_same else "new", "new")
    async with fakes_of(first, second, painter, newer), hub_of(OLD) as registry:
        for replica in (first, second):
            await registry.add_serving(replica.info, OLD)
        running = asyncio.create_task(collect(registry.omni.generate({"prompt": "one"})))
        await until(lambda: len(first.of(wire.Submit)) == 1)
        registry.apply(new)
        await registry.add_serving(painter.info, new)
        if not first_is_same:
            await registry.add_serving(newer.info, new)
        registry.remove(second.info)
        await registry.applied()
        (submit,) = first.of(wire.Submit)
        first.done(submit, 0)
        if first_is_same:
            assert {output.replica for output in await running if output.replica} == {"0/0", "1/10"}
        else:
            with pytest.raises(StageUnavailableError, match="stage 1"):
                await running
            assert painter.of(wire.Submit) == []


async def test_a_document_with_other_stages_is_not_followed_and_the_hub_says_so() -> None:
    """1. the pipeline gets a stage more: the hub goes on, and counts and says that it has to be restarted
    2. the old one is applied again, and all is well
    """
    first, second = FakeReplica(), FakeReplica(picture, 1)
    more = deploy_of("stages: [{stage_id: 0, engine: echo, final_output: text}]")
    async with fakes_of(first, second), hub_of(OLD) as registry:
        for replica in (first, second):
            await registry.add_serving(replica.info, OLD)
        registry.apply(more)
        await until(lambda: registry.figure("omni_hub_pipeline_not_followed") == 1)
        assert "restart" in registry.omni.releases.problem
        assert text_of(await collect(registry.omni.generate({"prompt": "a b"}))) == "a b "
        registry.apply(OLD)
        await until(lambda: registry.figure("omni_hub_pipeline_not_followed") == 0)


async def test_of_one_document_the_replica_with_other_files_is_not_picked_until_it_has_the_same() -> None:
    """1. three have loaded the same, one has not: it gets nothing
    2. it comes back with the same files and gets its share
    """
    replicas = [FakeReplica(replica_id=number) for number in range(4)]
    one = deploy_of("stages: [{stage_id: 0, engine: echo, final_output: text}]")
    async with fakes_of(*replicas), hub_of(one) as registry:
        registry.pipeline = encode_deploy(one)
        for replica in replicas:
            content = "other" if replica is replicas[0] else "same"
            registry.add(replica.info, one, content=content)
        await until(lambda: registry.omni.stage_status()[0].pickable == 3)
        await until(lambda: registry.omni.releases.every.answers(0, replicas[0].info.input_addr))
        await asyncio.gather(*(collect(registry.omni.generate({"prompt": "a"})) for _ in range(12)))
        assert replicas[0].of(wire.Submit) == []
        registry.add(replicas[0].info, one, content="same")
        await until(lambda: registry.omni.stage_status()[0].pickable == 4)
        await asyncio.gather(*(collect(registry.omni.generate({"prompt": "a"})) for _ in range(40)))
        assert replicas[0].of(wire.Submit) != []


async def test_a_request_that_moves_in_the_moment_in_which_it_is_served_holds_no_slot_of_the_old_version() -> None:
    """1. a request waits for the old version; a slot frees, and in the same turn its second stage is gone
    2. the new version serves it, and nothing of it is left in the old one's pool
    """
    first, second = FakeReplica(), FakeReplica(picture, 1)
    newer, painter = FakeReplica(replica_id=10), FakeReplica(picture, 1, 10)
    async with fakes_of(first, second, newer, painter), hub_of(OLD) as registry:
        for replica in (first, second):
            await registry.add_serving(replica.info, OLD)
        pool = registry.omni.releases.newest.pools[0]
        full = replace(registry.infos[first.info.input_addr], weight=0.0)
        free, registry.infos[first.info.input_addr] = registry.infos[first.info.input_addr], full
        registry.show()
        await registry.applied()
        waiting = asyncio.create_task(collect(registry.omni.generate({"prompt": "two"})))
        await until(lambda: len(pool.core.queue) == 1)
        registry.apply(NEW)
        await registry.add_serving(newer.info, NEW)
        await registry.add_serving(painter.info, NEW)
        del registry.infos[second.info.input_addr]
        registry.infos[first.info.input_addr] = free
        registry.show()
        outputs = await waiting
        assert {output.replica for output in outputs if output.replica} == {"0/10", "1/10"}
        assert pool.core.members.in_flight(first.info.input_addr) == []
        assert first.of(wire.Submit) == []
