"""Where one etcd ends: real registrars, real leases, real hubs, and members of etcd that write to the disk.

    python -m tests.bench.capacity --replicas 300 1000 --hubs 1 10 --out capacity.json

Needs root: each member of etcd, all hubs and all replicas have a host of their own (network namespaces), so that what
travels to the hubs can be counted and hosts can be cut off. etcd has fsync on and its own timings. Each hub's client is
a process of its own; the registrars share a few processes and connections, each with a lease and a watch of its own.
They take any free id, as replicas do. Hubs have no data plane here: sessions with replicas are not part of it.

First the costs, by two windows: nothing changes, and every replica has a new load twice a second. Then what breaks all
at once, and how long until every hub's view is fresh, has all replicas and is the same as the others'. With several
``--clusters``, that many namespaces, each on an etcd of its own, run side by side; then only the costs are taken.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from omni_discovery.etcd.embedded import find_binary
from tests.bench import report
from tests.bench.actors import Actor
from tests.bench.ours import OurHub, Registrars
from tests.support.host_etcd import etcdctl_on
from tests.support.netns import Host, Network
from tests.support.processes import wait_for

_NAMESPACE: Final = "bench-capacity"
_TTL_S: Final = 10.0
_REGISTRARS_EACH: Final = 250
_CHANGE_EACH_S: Final = 0.5
#: Two TTLs: every lease of replicas that are cut off for so long runs out.
_CUT_S: Final = 20.0
_LONGEST_S: Final = 300.0
#: What etcd counts, by the names of the columns.
_COUNTERS: Final = {
    "etcd_mvcc_put_total": "puts",
    "etcd_server_proposals_committed_total": "proposals",
    "etcd_debugging_lease_renewed_total": "renewals",
    "etcd_disk_wal_fsync_duration_seconds_count": "fsyncs",
    "etcd_disk_wal_fsync_duration_seconds_sum": "fsync_s",
    "process_cpu_seconds_total": "cpu_s",
    "process_resident_memory_bytes": "rss_bytes",
    "etcd_mvcc_db_total_size_in_bytes": "db_bytes",
    "etcd_server_leader_changes_seen_total": "leader_changes",
}
FAULTS: Final = ("restart", "etcd", "hubs-cut", "leader-cut", "replicas-cut")


class Cluster:
    """Members of etcd on hosts of their own, with their data on this machine's disk."""

    def __init__(self, network: Network, hosts: Sequence[Host], folder: Path) -> None:
        self._network, self.hosts, self._folder = network, hosts, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for host in hosts:
            (folder / host.name).mkdir()

    @property
    def endpoints(self) -> str:
        """As clients take them."""
        return ",".join(f"http://{host.address}:2379" for host in self.hosts)

    def start(self) -> None:
        """Start all members on their data; return when all answer."""
        everybody = ",".join(f"{host.name}=http://{host.address}:2380" for host in self.hosts)
        for host in self.hosts:
            client, peer = (f"http://{host.address}:{port}" for port in (2379, 2380))
            flags = [
                *("--name", host.name, "--data-dir", str(self._folder / host.name / "data"), "--log-level=error"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", everybody, "--initial-cluster-token", self._folder.name),
            ]
            with (self._folder / f"{host.name}.log").open("ab") as log:
                command = host.command(str(find_binary(None)), *flags)
                self._processes[host.name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for host in self.hosts:
            wait_for(f"etcd on {host.name}", lambda host=host: etcdctl_on(host, "get", "/") is not None, 60.0)  # type: ignore[misc]

    def kill(self) -> None:
        """As if all its machines lost power."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()

    def leader(self) -> Host:
        """The member that leads now."""
        return next(host for host in self.hosts if self._read(host).get("etcd_server_is_leader"))

    def counted(self) -> report.Row:
        """The counters: those of one member for what all members do, the sum of all for the rest."""
        found = [self._read(host) for host in self.hosts]
        row: report.Row = {}
        for name, column in _COUNTERS.items():
            values = [each.get(name, 0.0) for each in found]
            row[column] = max(values) if column in ("puts", "proposals", "leader_changes") else sum(values)
        return row

    @staticmethod
    def _read(host: Host) -> dict[str, float]:
        with host.inside(), urllib.request.urlopen(f"http://{host.address}:2379/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: float(value) for name, _, value in (line.partition(" ") for line in lines if not line.startswith("#"))
        }


class Fleet:
    """One namespace: its cluster, its replicas and its hubs."""

    def __init__(self, stack: ExitStack, network: Network, number: int, members: int, folder: Path) -> None:
        self._stack, self._network = stack, network
        own = folder / f"cluster{number}"
        own.mkdir()
        hosts = network.hosts
        self.cluster = Cluster(network, [hosts[f"m{number}{member}"] for member in range(members)], own)
        self._hub_host, self._replica_host = hosts[f"hubs{number}"], hosts[f"replicas{number}"]
        self.hubs: list[Actor] = []
        self.registrars: list[Actor] = []
        self._ports = itertools.count(40001, 2)
        self._port = 0
        stack.callback(self.cluster.kill)
        self.cluster.start()

    @property
    def replicas_host(self) -> Host:
        return self._replica_host

    @property
    def hubs_host(self) -> Host:
        return self._hub_host

    def add_hubs(self, count: int) -> None:
        """So many hubs on the empty or full namespace."""
        with self._hub_host.inside():
            self.hubs = [
                self._stack.enter_context(Actor(OurHub, self.cluster.endpoints, _NAMESPACE, f"hub{number}"))
                for number in range(count)
            ]
        for hub in self.hubs:
            hub.call("open")

    def make_replicas(self, count: int) -> list[Actor]:
        """New processes of registrars, which are not told to begin yet."""
        self._port = next(self._ports)
        with self._replica_host.inside():
            return [
                self._stack.enter_context(
                    Actor(
                        Registrars,
                        self.cluster.endpoints,
                        _NAMESPACE,
                        first,
                        min(_REGISTRARS_EACH, count - first),
                        _TTL_S,
                        self._port,
                    )
                )
                for first in range(0, count, _REGISTRARS_EACH)
            ]

    def begin(self, registrars: list[Actor]) -> None:
        """All of them register at once."""
        self.registrars = registrars
        for each in registrars:
            each.call("begin")

    def kill_replicas(self) -> None:
        """All at once, without a word."""
        for each in self.registrars:
            each.kill()

    def change_loads(self, turn: int) -> None:
        for each in self.registrars:
            each.call("load", turn)

    def until_agreed(self, replicas: int, began_s: float | None = None) -> tuple[float, float | None]:
        """Seconds until every hub's view is fresh and all have the same lives of all replicas, and no other.

        Also: until no view lacked a replica.
        """
        began_s = time.monotonic() if began_s is None else began_s
        complete_s = None
        while True:
            seen = self._look()
            now_s = time.monotonic() - began_s
            if complete_s is None and all(up >= replicas for up, _ in seen):
                complete_s = now_s
            if all(is_fresh and up == replicas for up, is_fresh in seen):
                lives = [hub.call("lives", self._port, timeout_s=_LONGEST_S) for hub in self.hubs]
                if all(ours == replicas for ours, _ in lives) and len({digest for _, digest in lives}) == 1:
                    return now_s, complete_s
            if now_s > _LONGEST_S:
                raise TimeoutError(f"the views do not agree after {now_s:.0f} s: {seen}")
            time.sleep(0.1)

    def last_bad_s(self, replicas: int, window_s: float) -> float:
        """The last of so many seconds in which a view was stale or did not have all replicas; 0 if there was none."""
        began_s, last_s = time.monotonic(), 0.0
        while (now_s := time.monotonic() - began_s) < window_s:
            if not all(is_fresh and up == replicas for up, is_fresh in self._look()):
                last_s = now_s
            time.sleep(0.1)
        return last_s

    def _look(self) -> list[tuple[int, bool]]:
        return [hub.call("up", timeout_s=_LONGEST_S) for hub in self.hubs]

    def counted(self) -> report.Row:
        """All counters now: etcd's, and what hubs and replicas have taken."""
        row = self.cluster.counted()
        row["at_s"] = time.monotonic()
        row["to_hubs_bytes"] = self._network.received_bytes(self._hub_host)
        row["hubs_cpu_s"] = sum(hub.cpu_s() for hub in self.hubs)
        row["replicas_cpu_s"] = sum(each.cpu_s() for each in self.registrars)
        return row

    def cost(self, window_s: float) -> report.Row:
        """What passes in so long."""
        before = self.counted()
        time.sleep(window_s)
        after = self.counted()
        took_s = after["at_s"] - before["at_s"]
        rate = {name: (after[name] - before[name]) / took_s for name in after}
        hubs = max(1, len(self.hubs))
        fsyncs = after["fsyncs"] - before["fsyncs"]
        return {
            "puts_per_s": round(rate["puts"], 1),
            "proposals_per_s": round(rate["proposals"], 1),
            "renewals_per_s": round(rate["renewals"], 1),
            "fsync_ms": round(1000 * (after["fsync_s"] - before["fsync_s"]) / fsyncs, 2) if fsyncs else None,
            "kB_per_s_to_each_hub": round(rate["to_hubs_bytes"] / hubs / 1000, 1),
            "etcd_cores": round(rate["cpu_s"], 3),
            "etcd_mb_each": round(after["rss_bytes"] / len(self.cluster.hosts) / 1e6),
            "hub_cores_each": round(rate["hubs_cpu_s"] / hubs, 4),
            "hub_mb_each": round(sum(hub.memory_bytes() for hub in self.hubs) / hubs / 1e6, 1),
            "replicas_cores": round(rate["replicas_cpu_s"], 3),
            "leader_changes": int(after["leader_changes"] - before["leader_changes"]),
            "load_average": report.machine()["load_average"][0],
        }


@contextmanager
def _changing(fleets: Sequence[Fleet]) -> Iterator[None]:
    """Every replica has a new load, again and again."""
    over = threading.Event()

    def change() -> None:
        for turn in itertools.count(1):
            if over.wait(_CHANGE_EACH_S):
                return
            for fleet in fleets:
                fleet.change_loads(turn)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _costs(fleets: Sequence[Fleet], window_s: float, settle_s: float) -> Iterator[report.Row]:
    for name, is_busy in (("quiet", False), ("loads change", True)):
        with _changing(fleets if is_busy else ()):
            # The replicas are counted for the write budget some seconds after they have registered.
            time.sleep(settle_s)
            rows = _at_once([lambda fleet=fleet: fleet.cost(window_s) for fleet in fleets])  # type: ignore[misc]
        yield from ({"window": name, "cluster": number, **row} for number, row in enumerate(rows))


def _at_once(calls: Sequence[Callable[[], report.Row]]) -> list[report.Row]:
    found: dict[int, report.Row] = {}

    def run(number: int, call: Callable[[], report.Row]) -> None:
        found[number] = call()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(calls))]


def _fault(name: str, network: Network, fleet: Fleet, replicas: int) -> report.Row:
    """One fault; the time from its end, or from the restart, until all is well."""
    before = fleet.counted()
    match name:
        case "restart":
            new = fleet.make_replicas(replicas)
            fleet.kill_replicas()
            fleet.begin(new)
            agreed_s, complete_s = fleet.until_agreed(replicas)
        case "etcd":
            fleet.cluster.kill()
            time.sleep(5.0)
            before, began_s = {}, time.monotonic()
            fleet.cluster.start()
            agreed_s, complete_s = fleet.until_agreed(replicas, began_s)
        case "hubs-cut":
            agreed_s, complete_s = _cut(network, fleet, fleet.hubs_host, replicas)
        case "replicas-cut":
            agreed_s, complete_s = _cut(network, fleet, fleet.replicas_host, replicas)
        case "leader-cut":
            leader = fleet.cluster.leader()
            network.cut(leader)
            agreed_s, complete_s = fleet.last_bad_s(replicas, _CUT_S), None
            network.join(leader)
            agreed_s = max(agreed_s, fleet.last_bad_s(replicas, _CUT_S))
        case _:
            raise ValueError(name)
    after = fleet.counted()
    return {
        "fault": name,
        "complete_s": None if complete_s is None else round(complete_s, 1),
        "agreed_s": round(agreed_s, 1),
        # An etcd that was started again has counted from 0.
        "puts": int(after["puts"] - before["puts"]) if before else None,
        "proposals": int(after["proposals"] - before["proposals"]) if before else None,
        "load_average": report.machine()["load_average"][0],
    }


def _cut(network: Network, fleet: Fleet, host: Host, replicas: int) -> tuple[float, float | None]:
    network.cut(host)
    time.sleep(_CUT_S)
    network.join(host)
    return fleet.until_agreed(replicas)


def measure(replicas: int, hubs: int, arguments: argparse.Namespace) -> list[report.Row]:
    """All of it for one size, each cluster of which has so many replicas and hubs."""
    size = {"replicas": replicas, "hubs": hubs, "members": arguments.members, "clusters": arguments.clusters}
    parts = range(arguments.clusters)
    names = [
        name for n in parts for name in (*(f"m{n}{m}" for m in range(arguments.members)), f"hubs{n}", f"replicas{n}")
    ]
    rows: list[report.Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder, prefix="omni-capacity-")))
        network = stack.enter_context(Network(*names))
        fleets = [Fleet(stack, network, number, arguments.members, folder) for number in parts]
        for fleet in fleets:
            fleet.add_hubs(hubs)
        ready = [fleet.make_replicas(replicas) for fleet in fleets]
        before = [fleet.counted() for fleet in fleets]
        for fleet, registrars in zip(fleets, ready, strict=True):
            fleet.begin(registrars)
        for number, fleet in enumerate(fleets):
            agreed_s, _ = fleet.until_agreed(replicas)
            after = fleet.counted()
            rows.append(
                {
                    "fault": "first start",
                    "cluster": number,
                    "agreed_s": round(agreed_s, 1),
                    "puts": int(after["puts"] - before[number]["puts"]),
                    "proposals": int(after["proposals"] - before[number]["proposals"]),
                    "load_average": report.machine()["load_average"][0],
                }
            )
            report.console.print(size | rows[-1])
        for row in _costs(fleets, arguments.window_s, arguments.settle_s):
            rows.append(row)
            report.console.print(size | row)
        for name in arguments.faults if arguments.clusters == 1 else ():
            rows.append(_fault(name, network, fleets[0], replicas))
            report.console.print(size | rows[-1])
    return [size | row for row in rows]


def main() -> None:
    """Measure each number of replicas with each number of hubs; print as it comes, write all as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", nargs="+", type=int, default=[300, 1000], help="of each cluster")
    parser.add_argument("--hubs", nargs="+", type=int, default=[1, 10], help="of each cluster")
    parser.add_argument("--members", type=int, default=3, help="of each cluster")
    parser.add_argument("--clusters", type=int, default=1)
    parser.add_argument("--window-s", type=float, default=20.0)
    parser.add_argument("--settle-s", type=float, default=15.0, help="before each window")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--folder", type=Path, help="where etcd's data is, on a real disk")
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    arguments = parser.parse_args()
    results: report.Row = {"machine": report.machine(), "rows": []}
    for hubs in arguments.hubs:
        for replicas in arguments.replicas:
            results["rows"] += measure(replicas, hubs, arguments)
            report.write(arguments.out, results)


if __name__ == "__main__":
    main()
