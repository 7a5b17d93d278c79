"""What a hub does with replicas that vanish from the registry while they answer."""

from __future__ import annotations

from dataclasses import replace

from hub.async_omni import AsyncOmni
from omni_discovery.view.table import Delta, View
from tests.support.hub_fakes import QUICK, FakeReplica, collect, running_hub, show, text_of, until, view_of

#: With leases of 1 s, so that a test can outwait one.
SHORT = replace(QUICK, registry_ttl_s=1.0)


def pickable(omni: AsyncOmni) -> int:
    return omni.stage_status()[0].pickable


def registered(omni: AsyncOmni) -> int:
    return omni.stage_status()[0].registered


def see(omni: AsyncOmni, view: View) -> None:
    omni.apply_view(view, Delta())


async def test_a_pool_that_vanishes_whole_is_served_on_and_ends_as_one() -> None:
    """1. three replicas vanish at once, all answer: all are picked on
    2. none comes back within the TTL: the last answering one is picked on
    3. it dies: nobody is left
    """
    replicas = [FakeReplica(replica_id=number) for number in range(3)]
    async with running_hub(*replicas, config=SHORT) as omni:
        show(omni)
        await until(lambda: registered(omni) == 0)
        assert pickable(omni) == 3
        assert text_of(await collect(omni.generate({"prompt": "still here"}))) == "still here "
        await until(lambda: pickable(omni) == 1)
        assert text_of(await collect(omni.generate({"prompt": "the last"}))) == "the last "
        for replica in replicas:
            replica.kill()
        await until(lambda: pickable(omni) == 0)


async def test_one_of_many_that_vanishes_is_not_picked_any_more() -> None:
    replicas = [FakeReplica(replica_id=number) for number in range(3)]
    async with running_hub(*replicas, config=SHORT) as omni:
        show(omni, *(replica.info for replica in replicas[:2]))
        await until(lambda: pickable(omni) == 2)


async def test_a_single_one_is_served_on_when_the_registry_went_back() -> None:
    """Wiped, and relisted empty at a lower revision than before; then the replica puts itself back."""
    replica = FakeReplica()
    async with running_hub(replica, config=SHORT) as omni:
        see(omni, View(revision=1, history=1, cluster_id=9))
        await until(lambda: registered(omni) == 0)
        assert pickable(omni) == 1
        listed = {(0, 0): replica.info}
        see(omni, View(replicas=listed, revision=3, history=1, cluster_id=9))
        await until(lambda: registered(omni) == 1)
        assert pickable(omni) == 1


async def test_the_first_of_a_mass_is_fetched_back() -> None:
    """1. a vanishes alone: no picks
    2. b vanishes, too: two of two within a TTL; both are picked again
    """
    a, b = FakeReplica(), FakeReplica(replica_id=1)
    async with running_hub(a, b, config=replace(QUICK, registry_ttl_s=5.0)) as omni:
        show(omni, b.info)
        await until(lambda: pickable(omni) == 1)
        show(omni)
        await until(lambda: pickable(omni) == 2)
        assert registered(omni) == 0


async def test_while_the_view_is_stale_nobody_is_given_up() -> None:
    a, b = FakeReplica(), FakeReplica(replica_id=1)
    async with running_hub(a, b, config=replace(QUICK, registry_ttl_s=1.0)) as omni:
        stale = replace(view_of([]), stale_since_s=1.0)
        see(omni, stale)
        await until(lambda: registered(omni) == 0)
        assert pickable(omni) == 2
        see(omni, replace(stale, stale_since_s=None))
        await until(lambda: pickable(omni) == 1)
