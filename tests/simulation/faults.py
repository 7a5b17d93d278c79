"""What breaks, and how it is mended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.records import keys
from tests.simulation.plan import Fault
from tests.simulation.registry import _run_now
from tests.simulation.replica import SimSupervisor

if TYPE_CHECKING:
    from tests.simulation.world import World


def begin(world: World, fault: Fault) -> None:
    """Break something. In the world's context."""
    world.note("fault", fault.kind, fault.for_s)
    supervisor = _supervisor(world, fault)
    replica = supervisor.replica
    is_there = replica is not None and replica.process.is_alive
    place = world.hub_places[fault.hub]
    hub = place.hub if place.hub is not None and place.hub.process.is_alive else None
    etcd, judge = world.etcd, world.judge
    members = list(etcd.hosts)
    match fault.kind:
        case "kill replica":
            if is_there:
                judge.disturbed(supervisor.host)
                world.kill(replica.process)
                world.after(0.0, supervisor.ended, -9, replica)
        case "kill hub":
            if hub is not None:
                judge.disturbed(place.host)
                world.kill(hub.process)
                judge.hub_died(hub)
                world.after(1.0 + fault.for_s, place.start)
        case "pause replica":
            if is_there:
                judge.disturbed(supervisor.host, fault.for_s)
                world.pause(replica.process, fault.for_s)
        case "pause hub":
            if hub is not None:
                judge.disturbed(place.host, fault.for_s)
                world.pause(hub.process, fault.for_s)
        case "hang engine":
            if is_there:
                judge.disturbed(supervisor.host, fault.for_s)
                replica.hang(fault.for_s)
        case "crash engine":
            if is_there:
                judge.disturbed(supervisor.host)
                judge.expected_errors += 1
                replica.engine.crashes = True
        case "terminate replica":
            if is_there:
                judge.disturbed(supervisor.host)
                replica.terminate()
        case "drain by key":
            _write_control(world, supervisor, b'{"drain": true}')
            judge.disturbed(supervisor.host)
        case "cordon":
            _write_control(world, supervisor, b'{"cordon": true}')
            judge.disturbed(supervisor.host, fault.for_s)
            world.after(fault.for_s, _remove_control, world, supervisor)
        case "cut hub from replica":
            _cut(world, fault.for_s, [(place.host, supervisor.host), (supervisor.host, place.host)])
        case "cut one way":
            _cut(world, fault.for_s, [(supervisor.host, place.host)])
        case "cut replica from etcd":
            _cut(world, fault.for_s, [(a, b) for m in members for a, b in ((supervisor.host, m), (m, supervisor.host))])
        case "cut hub from etcd":
            _cut(world, fault.for_s, [(a, b) for m in members for a, b in ((place.host, m), (m, place.host))])
        case "power off":
            _power_off(world, supervisor, fault.for_s)
        case "etcd leader":
            etcd.change_leader(fault.for_s)
        case "etcd member":
            etcd.member_down(fault.member)
            world.after(fault.for_s, etcd.member_up, fault.member)
        case "etcd member behind":
            etcd.member_behind(fault.member, is_behind=True)
            world.after(fault.for_s, lambda: etcd.member_behind(fault.member, is_behind=False))
        case "etcd away":
            etcd.change_leader(fault.for_s)
        case "etcd compacts":
            etcd.compact()
        case "etcd loses answers":
            etcd.lost_answers = 0.3
            world.after(fault.for_s, setattr, etcd, "lost_answers", 0.0)
        case "etcd loses a key":
            if is_there:
                judge.disturbed(supervisor.host)
                key = keys.replica_key(world.namespace, fault.stage, _registered_id(supervisor))
                _run_now(etcd.delete(key))
        case "etcd loses a lease":
            if is_there and replica.client is not None and replica.client.lease_id:
                judge.disturbed(supervisor.host)
                etcd.end_lease(replica.client.lease_id)
        case "nonsense in etcd":
            key = keys.replica_key(world.namespace, fault.stage, 900 + fault.index)
            _run_now(etcd.put(key, b'{"schema": 1, "stage_id": "nonsense"'))
            world.after(fault.for_s, lambda: _run_now(etcd.delete(key)))
        case "slow network":
            world.network.jitter_s += 0.1
            world.after(fault.for_s, _faster, world)
        case "clock jumps":
            for process in [each.process for each in (replica, hub) if each is not None]:
                process.wall_skew_s += 3600.0 if fault.index % 2 else -3600.0
        case _:
            raise ValueError(fault.kind)


def mend_all(world: World) -> None:
    """After the last fault: nothing is cut, drained or cordoned any more."""
    for supervisor in world.supervisors:
        _remove_control(world, supervisor)
        if supervisor.is_left_down:
            supervisor.is_left_down = False
            world.after(0.0, supervisor.start)


def _supervisor(world: World, fault: Fault) -> SimSupervisor:
    return next(
        each for each in world.supervisors if (each.stage_id, each.index) == (fault.stage, fault.index)
    )


def _registered_id(supervisor: SimSupervisor) -> int:
    replica = supervisor.replica
    return -1 if replica is None or replica._replica_id is None else replica._replica_id


def _write_control(world: World, supervisor: SimSupervisor, value: bytes) -> None:
    replica_id = _registered_id(supervisor)
    if replica_id >= 0:
        key = keys.replica_control_key(world.namespace, supervisor.stage_id, replica_id)
        _run_now(world.etcd.put(key, value))


def _remove_control(world: World, supervisor: SimSupervisor) -> None:
    prefix = f"/omni/v1/{world.namespace}/control/"
    for key in [key for key in world.etcd.keys() if key.startswith(prefix)]:
        _run_now(world.etcd.delete(key))


def _cut(world: World, for_s: float, pairs: list[tuple[str, str]]) -> None:
    for host in {host for pair in pairs for host in pair}:
        world.judge.disturbed(host, for_s)
    world.network.cut(pairs)
    world.after(for_s, world.network.mend, pairs)


def _power_off(world: World, supervisor: SimSupervisor, for_s: float) -> None:
    """The host is gone at once, and comes back later: nobody closes its connections."""
    host = supervisor.host
    if supervisor.is_off:
        return
    world.judge.disturbed(host, for_s)
    others = {process.host for process in world.processes} | set(world.etcd.hosts)
    pairs = [pair for other in sorted(others - {host}) for pair in ((host, other), (other, host))]
    world.network.cut(pairs)
    world.dead_hosts.add(host)
    supervisor.is_off = True
    replica, supervisor.replica = supervisor.replica, None
    if replica is not None and replica.process.is_alive:
        world.kill(replica.process)

    def back() -> None:
        world.dead_hosts.discard(host)
        world.network.mend(pairs)
        supervisor.is_off = False
        supervisor.start()

    world.after(for_s, back)


def _faster(world: World) -> None:
    world.network.jitter_s -= 0.1
