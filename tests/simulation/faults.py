"""What breaks, and how it is mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from omni_discovery.records import keys
from tests.simulation.plan import Fault
from tests.simulation.registry import run_now

if TYPE_CHECKING:
    from tests.simulation.hub import SimHub
    from tests.simulation.replica import SimReplica, SimSupervisor
    from tests.simulation.world import HubPlace, World


@dataclass(frozen=True, slots=True)
class Scene:
    """What a fault may break. ``replica`` and ``hub`` are None where no process is alive now."""

    world: World
    fault: Fault
    supervisor: SimSupervisor
    replica: SimReplica | None
    place: HubPlace
    hub: SimHub | None

    def disturb(self, host: str, for_s: float = 0.0) -> None:
        """Tell the judge that something is done to a host."""
        self.world.judge.disturbed(host, for_s)


def begin(world: World, fault: Fault) -> None:
    """Break something. In the world's context."""
    world.note("fault", fault.kind, fault.for_s)
    supervisor = next(each for each in world.supervisors if (each.stage_id, each.index) == (fault.stage, fault.index))
    replica, place = supervisor.replica, world.hub_places[fault.hub]
    is_there = replica is not None and replica.process.is_alive
    is_served = place.hub is not None and place.hub.process.is_alive
    scene = Scene(world, fault, supervisor, replica if is_there else None, place, place.hub if is_served else None)
    _BREAK[fault.kind](scene)


def _kill_replica(scene: Scene) -> None:
    if scene.replica is not None:
        scene.disturb(scene.supervisor.host)
        scene.world.judge.replica_killed(scene.replica)
        scene.world.exit_process(scene.replica.process)
        scene.world.after(0.0, scene.supervisor.ended, -9, scene.replica)


def _kill_hub(scene: Scene) -> None:
    if scene.hub is not None:
        scene.disturb(scene.place.host)
        scene.world.exit_process(scene.hub.process)
        scene.world.judge.hub_died(scene.hub)
        scene.world.after(1.0 + scene.fault.for_s, scene.place.start)


def _pause_replica(scene: Scene) -> None:
    if scene.replica is not None:
        scene.disturb(scene.supervisor.host, scene.fault.for_s)
        scene.world.pause(scene.replica.process, scene.fault.for_s)


def _hold_replica(scene: Scene) -> None:
    if scene.replica is not None:
        scene.disturb(scene.supervisor.host, scene.fault.for_s)
        scene.world.hold(scene.replica.process, scene.fault.for_s)


def _pause_hub(scene: Scene) -> None:
    if scene.hub is not None:
        scene.disturb(scene.place.host, scene.fault.for_s)
        scene.world.pause(scene.hub.process, scene.fault.for_s)


def _hang_engine(scene: Scene) -> None:
    if scene.replica is not None:
        scene.disturb(scene.supervisor.host, scene.fault.for_s)
        scene.replica.hang(scene.fault.for_s)


def _crash_engine(scene: Scene) -> None:
    if scene.replica is not None:
        scene.disturb(scene.supervisor.host)
        scene.replica.engine.crashes = True


def _terminate_replica(scene: Scene) -> None:
    if scene.replica is not None:
        scene.disturb(scene.supervisor.host)
        scene.replica.terminate()


def _drain_by_key(scene: Scene) -> None:
    scene.disturb(scene.supervisor.host)
    _write_control(scene, b'{"drain": true}')


def _cordon(scene: Scene) -> None:
    scene.disturb(scene.supervisor.host, scene.fault.for_s)
    _write_control(scene, b'{"cordon": true}')
    scene.world.after(scene.fault.for_s, remove_controls, scene.world)


def _cut_hub_from_replica(scene: Scene) -> None:
    hub, replica = scene.place.host, scene.supervisor.host
    _cut(scene, [(hub, replica), (replica, hub)])


def _cut_one_way(scene: Scene) -> None:
    _cut(scene, [(scene.supervisor.host, scene.place.host)])


def _cut_from_etcd(scene: Scene, host: str) -> None:
    _cut(scene, [pair for member in scene.world.etcd.hosts for pair in ((host, member), (member, host))])


def _power_off(scene: Scene) -> None:
    """The host is gone at once, and comes back later: nobody closes its connections."""
    world, supervisor, host = scene.world, scene.supervisor, scene.supervisor.host
    if supervisor.is_off:
        return
    scene.disturb(host, scene.fault.for_s)
    others = {process.host for process in world.processes} | set(world.etcd.hosts)
    pairs = [pair for other in sorted(others - {host}) for pair in ((host, other), (other, host))]
    world.network.cut(pairs)
    world.dead_hosts.add(host)
    supervisor.is_off, supervisor.replica = True, None
    if scene.replica is not None:
        # Nobody closes a connection: only heartbeats tell.
        world.judge.replica_killed(scene.replica, silent_s=world.heartbeat_timeout_s + 1.0)
        world.exit_process(scene.replica.process)

    def back() -> None:
        world.dead_hosts.discard(host)
        world.network.mend(pairs)
        supervisor.is_off = False
        supervisor.start()

    world.after(scene.fault.for_s, back)


def _change_leader(scene: Scene) -> None:
    scene.world.etcd.change_leader(scene.fault.for_s)


def _stop_member(scene: Scene) -> None:
    etcd, member = scene.world.etcd, scene.fault.member
    etcd.member_down(member)
    scene.world.after(scene.fault.for_s, etcd.member_up, member)


def _leave_member_behind(scene: Scene) -> None:
    etcd, member = scene.world.etcd, scene.fault.member
    etcd.member_behind(member, is_behind=True)
    scene.world.after(scene.fault.for_s, lambda: etcd.member_behind(member, is_behind=False))


def _compact(scene: Scene) -> None:
    scene.world.etcd.compact()


def _lose_answers(scene: Scene) -> None:
    scene.world.etcd.lost_answers = 0.3
    scene.world.after(scene.fault.for_s, setattr, scene.world.etcd, "lost_answers", 0.0)


def _lose_key(scene: Scene) -> None:
    if scene.replica is not None:
        scene.disturb(scene.supervisor.host)
        key = keys.replica_key(scene.world.namespace, scene.fault.stage, scene.replica.registered_id)
        run_now(scene.world.etcd.delete(key))


def _lose_lease(scene: Scene) -> None:
    client = None if scene.replica is None else scene.replica.client
    if client is not None and client.lease_id:
        scene.disturb(scene.supervisor.host)
        scene.world.etcd.end_lease(client.lease_id)


def _write_nonsense(scene: Scene) -> None:
    etcd = scene.world.etcd
    key = keys.replica_key(scene.world.namespace, scene.fault.stage, 900 + scene.fault.index)
    run_now(etcd.put(key, b'{"schema": 1, "stage_id": "nonsense"'))
    scene.world.after(scene.fault.for_s, lambda: run_now(etcd.delete(key)))


def _wipe(scene: Scene) -> None:
    """Another cluster answers, with nothing in it: an operator has restored an empty one."""
    scene.world.etcd.wipe()


def _revoke_hub(scene: Scene) -> None:
    world, hub_id = scene.world, f"hub-{scene.fault.hub}"
    key = keys.hub_control_key(world.namespace, hub_id)
    scene.disturb(scene.place.host, scene.fault.for_s)
    run_now(world.etcd.put(key, b'{"revoked": true}'))
    world.judge.hub_revoked(hub_id)

    def allow() -> None:
        run_now(world.etcd.delete(key))
        world.judge.hub_allowed(hub_id)

    world.after(scene.fault.for_s, allow)


def _slow_network(scene: Scene) -> None:
    network = scene.world.network
    network.jitter_s += 0.1

    def faster() -> None:
        network.jitter_s -= 0.1

    scene.world.after(scene.fault.for_s, faster)


def _move_clocks(scene: Scene) -> None:
    for process in [each.process for each in (scene.replica, scene.hub) if each is not None]:
        process.wall_skew_s += 3600.0 if scene.fault.index % 2 else -3600.0


_BREAK: Final[dict[str, Callable[[Scene], None]]] = {
    "kill replica": _kill_replica,
    "kill hub": _kill_hub,
    "pause replica": _pause_replica,
    "hold replica": _hold_replica,
    "pause hub": _pause_hub,
    "hang engine": _hang_engine,
    "crash engine": _crash_engine,
    "terminate replica": _terminate_replica,
    "drain by key": _drain_by_key,
    "cordon": _cordon,
    "cut hub from replica": _cut_hub_from_replica,
    "cut one way": _cut_one_way,
    "cut replica from etcd": lambda scene: _cut_from_etcd(scene, scene.supervisor.host),
    "cut hub from etcd": lambda scene: _cut_from_etcd(scene, scene.place.host),
    "power off": _power_off,
    "etcd leader": _change_leader,
    "etcd member": _stop_member,
    "etcd member behind": _leave_member_behind,
    "etcd away": _change_leader,
    "etcd compacts": _compact,
    "etcd loses answers": _lose_answers,
    "etcd loses a key": _lose_key,
    "etcd loses a lease": _lose_lease,
    "etcd wiped": _wipe,
    "nonsense in etcd": _write_nonsense,
    "revoke hub": _revoke_hub,
    "slow network": _slow_network,
    "clock jumps": _move_clocks,
}


def mend_all(world: World) -> None:
    """After the last fault: nothing is drained or cordoned any more, and no engine crashes at its next request."""
    remove_controls(world)
    for replica in world.live_replicas():
        replica.engine.crashes = False
    for supervisor in world.supervisors:
        if supervisor.is_left_down:
            supervisor.is_left_down = False
            world.after(0.0, supervisor.start)


def remove_controls(world: World) -> None:
    """No operator wants anything of any replica."""
    prefix = f"/omni/v1/{world.namespace}/control/"
    for key in [key for key in world.etcd.keys_now() if key.startswith(prefix)]:
        run_now(world.etcd.delete(key))


def _write_control(scene: Scene, value: bytes) -> None:
    if scene.replica is not None and scene.replica.registered_id >= 0:
        key = keys.replica_control_key(scene.world.namespace, scene.fault.stage, scene.replica.registered_id)
        run_now(scene.world.etcd.put(key, value))


def _cut(scene: Scene, pairs: list[tuple[str, str]]) -> None:
    for host in sorted({host for pair in pairs for host in pair}):
        scene.disturb(host, scene.fault.for_s)
    scene.world.network.cut(pairs)
    scene.world.after(scene.fault.for_s, scene.world.network.mend, pairs)
