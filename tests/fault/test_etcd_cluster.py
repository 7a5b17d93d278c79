"""Members of a real etcd cluster die, freeze, are cut off and wiped; replicas and hubs go on."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.cluster import EtcdCluster, Member
from tests.support.population import Population
from tests.support.processes import wait_for

pytestmark = pytest.mark.docker

#: An election (0.5 to 1 s), one try that was under way, and the machine's own slowness.
FAILOVER_S = 6.0


def test_the_death_of_a_follower_changes_nothing_that_a_hub_sees(cluster: EtcdCluster, population: Population) -> None:
    victim = cluster.followers()[0]
    victim.kill()
    population.load_travels(FAILOVER_S)
    time.sleep(3.5)
    population.settle()
    assert population.membership_changes() == []
    victim.start()
    cluster.wait_serving()
    population.assert_keys_are_the_living(victim.endpoint)


def test_leader_after_leader_dies_and_no_replica_comes_or_goes(
    cluster: EtcdCluster, population: Population, rounds: int
) -> None:
    """Each leader is killed, a new load must still travel, and the dead member comes back before the next falls."""
    before = population.lives()
    for _ in range(rounds):
        victim = cluster.leader()
        victim.kill()
        population.load_travels(FAILOVER_S)
        victim.start()
        cluster.wait_serving()
    population.settle()
    assert population.membership_changes() == []
    assert population.lives() == before
    population.assert_keys_are_the_living(cluster.leader().endpoint)


def test_a_leader_that_freezes_for_longer_than_the_ttl_leaves_everybody_registered(
    cluster: EtcdCluster, population: Population
) -> None:
    """1. the leader stops answering, with all connections open: others take over, clients leave it
    2. it wakes and still believes to lead: old servers end leases then, so replicas may have to come back
    """
    victim = cluster.leader()
    victim.pause()
    paused_s = time.monotonic()
    population.load_travels(16.0)
    time.sleep(max(0.0, paused_s + 2 * population.ttl_s - time.monotonic()))
    victim.unpause()
    cluster.wait_serving()
    population.settle()
    time.sleep(1.0)
    population.settle()
    population.assert_keys_are_the_living(victim.endpoint)


def test_a_watch_on_a_member_without_a_quorum_moves_to_one_that_has_it(
    cluster: EtcdCluster, population: Population, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member still answers us, only not its peers: it must say so, or the view would be silently old."""
    victim = cluster.followers()[0]
    others = [member.endpoint for member in cluster.members if member is not victim]
    with monkeypatch.context() as patch:
        # Otherwise each client begins with an endpoint of its own choice.
        patch.setattr("omni_discovery.etcd.channel.random.randrange", lambda count: 0)
        population.add_hub(",".join([victim.endpoint, *others]))
    population.settle()
    population.membership_changes()
    cluster.cut_off(victim)
    population.load_travels(12.0)
    assert population.membership_changes() == []
    cluster.join_again(victim)
    cluster.wait_serving()
    population.settle()


def test_without_a_quorum_the_view_is_kept_and_called_stale_and_then_heals(
    cluster: EtcdCluster, population: Population
) -> None:
    before = population.lives()
    victims = cluster.members[:2]
    for victim in victims:
        victim.kill()
    wait_for("stale views", lambda: all(hub.view().stale_since_s for hub in population.hubs), 12.0)
    time.sleep(3.0)
    for hub in population.hubs:
        assert len(hub.get_replica_list().replicas) == 3
    for victim in victims:
        victim.start()
    population.settle()
    assert population.lives() == before
    assert population.membership_changes() == []
    population.load_travels(FAILOVER_S)


def test_a_wiped_cluster_is_filled_again_by_those_who_live(cluster: EtcdCluster, population: Population) -> None:
    """Another cluster answers at the same addresses, with another history: nobody is restarted."""
    known = {hub.view().cluster_id for hub in population.hubs}
    cluster.wipe()
    wait_for("the new cluster", lambda: not known & {hub.view().cluster_id for hub in population.hubs}, 15.0)
    population.settle()
    population.load_travels(FAILOVER_S)
    population.assert_keys_are_the_living(cluster.members[0].endpoint)


@pytest.mark.parametrize("seed", [1])
def test_whatever_happens_to_one_member_at_a_time_the_end_is_right(
    cluster: EtcdCluster, population: Population, rounds: int, seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(rounds):
        harm_for_a_while(cluster, chance.choice(cluster.members), chance)
        cluster.wait_serving()
    population.settle()
    population.load_travels(FAILOVER_S)
    population.assert_keys_are_the_living(cluster.leader().endpoint)


def harm_for_a_while(cluster: EtcdCluster, member: Member, chance: random.Random) -> None:
    harm, heal = chance.choice(
        [
            (member.kill, member.start),
            (member.pause, member.unpause),
            (lambda: cluster.cut_off(member), lambda: cluster.join_again(member)),
        ]
    )
    harm()
    time.sleep(chance.uniform(0.2, 2.5))
    heal()
