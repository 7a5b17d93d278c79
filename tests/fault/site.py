"""The whole product on hosts of its own: hubs behind HAProxy, two hosts of replicas, and three etcds in containers.

Hosts are network namespaces on one switch, which is joined to the containers' network. ``left`` and ``right`` each
have a supervisor with one replica of each of the two stages. Who restarts what has died is this file, as systemd or
Kubernetes would; supervisors restart their replicas themselves.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from stage_runtime.demo.processes import alive
from tests.support.binaries import require_haproxy
from tests.support.cluster import EtcdCluster, Member, etcd_image
from tests.support.hub import Hub
from tests.support.netns import Host, Network
from tests.support.processes import Child, wait_for
from tests.support.registry import etcdctl

ROOT: Final = Path(__file__).resolve().parents[2]
NAMESPACE: Final = "fault"
TTL_S: Final = 5.0
STAGES: Final = (0, 1)
SIDES: Final = ("left", "right")
HUBS: Final = ("a", "b", "c")
PORT: Final = 8000
#: Supervisors' metrics: this and the stage.
METRICS_PORT: Final = 9100
#: What one etcd may store, so that a fault can fill it.
QUOTA_BYTES: Final = 16 << 20
#: Nor does the history of writes fill it, as none of an operator's does.
ETCD_FLAGS: Final = (
    f"--quota-backend-bytes={QUOTA_BYTES}",
    "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=1m",
)
#: Each stage has two replicas of six slots; a stream takes 1.2 s.
DOCUMENT: Final = """
model: echo
async_chunk: true
stages:
  - stage_id: 0
    engine: echo
    engine_args: {capacity: 6, delay_s: 0.08}
    deterministic: true
    final_output: none
  - stage_id: 1
    engine: echo
    engine_args: {capacity: 6, random: true}
    deterministic: true
    final_output: text
"""
#: docs/http-api.md's, with an address to listen on.
HAPROXY: Final = """
global
    maxconn 1000
defaults
    mode tcp
    timeout connect 2s
    timeout client 120s
    timeout server 120s
    retries 3
    option redispatch 1
listen hubs
    bind {address}
    balance roundrobin
    default-server check inter 500ms fall 1
{servers}
"""


class Site:
    """All of it, ready to be asked at ``address`` once it is entered."""

    def __init__(
        self, folder: Path, hubs: int, hub_module: str = "omni_discovery", hub_flags: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self._hub_module = hub_module
        self.hub_flags = hub_flags
        self.names = HUBS[:hubs]
        self.hubs: dict[str, Hub] = {}
        #: By stage and side.
        self.supervisors: dict[tuple[int, str], Child] = {}
        self._lives = 0
        self._stack = ExitStack()
        #: Processes that did not end when they were told to.
        self.left: list[int] = []
        #: Logs of hubs that have ended.
        self.former: list[Path] = []
        #: What a fault leaves for its heal: a process, a member of etcd, clients, limits.
        self.victim = 0
        self.member: Member
        self.strangers: Sequence[Any] = ()
        self.limits = (0, 0)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def address(self) -> tuple[str, int]:
        """Where clients ask."""
        return self.hosts["front"].address, PORT

    @property
    def endpoints(self) -> str:
        return self.cluster.endpoints

    def _start(self) -> None:
        image_folder = self.folder / "image"
        image_folder.mkdir(parents=True)
        image = self._stack.enter_context(etcd_image(image_folder))
        self.cluster = self._stack.enter_context(EtcdCluster(image, ETCD_FLAGS))
        names = ("front", *SIDES, *self.names)
        self.network = self._stack.enter_context(Network(*names, subnet=self.cluster.subnet, first=100))
        self.network.join_bridge(self.cluster.bridge)
        self.hosts: dict[str, Host] = self.network.hosts
        self._stack.callback(self._stop_processes)
        for name in self.names:
            (self.folder / name).mkdir()
            self.start_hub(name)
        for stage in STAGES:
            for side in SIDES:
                self.start_supervisor(stage, side)
        self._start_haproxy()
        wait_for("a whole site", lambda: self.lack() == "", 240.0)

    # -- What runs ------------------------------------------------------------------------------------------------

    def start_hub(self, name: str, variables: Mapping[str, str] | None = None) -> None:
        """Start a hub, for the first time or again, with these environment variables."""
        former = self.hubs.get(name)
        if former is not None:
            self.former.append(former.log)
        folder, host = self.folder / name, self.hosts[name]
        (folder / "deploy.yaml").write_text(DOCUMENT)
        self._lives += 1
        flags = ["--deploy-config", str(folder / "deploy.yaml"), "--hub-only", "--host", host.address]
        flags += ["--port", str(PORT), "--max-waiting", "16", *self.hub_flags, *self._registry()]
        variables = {"PYTHONPATH": str(ROOT), **(variables or {})}
        self.hubs[name] = Hub(
            folder, flags, NAMESPACE, variables, module=self._hub_module, host=host, name=f"hub-{self._lives}"
        )
        self.hubs[name].url = f"http://{host.address}:{PORT}"

    def start_supervisor(self, stage: int, side: str, variables: Mapping[str, str] | None = None) -> None:
        """Start a supervisor with one replica, for the first time or again, with these environment variables."""
        host, folder = self.hosts[side], self.folder / f"{side}-{stage}"
        folder.mkdir(exist_ok=True)
        self._lives += 1
        flags = ["--stage-id", str(stage), "--omni-dp-size-local", "1", "--namespace", NAMESPACE]
        flags += ["--metrics-host", host.address, "--metrics-port", str(METRICS_PORT + stage), *self._registry()]
        self.supervisors[stage, side] = Child(
            ["serve", "--headless", *flags], folder, f"supervisor-{self._lives}", variables=variables, host=host
        )

    def _registry(self) -> list[str]:
        return ["--etcd-endpoints", self.endpoints, "--omni-heartbeat-timeout", str(TTL_S), "--drain-timeout", "10"]

    def _start_haproxy(self) -> None:
        servers = [f"    server {name} {self.hosts[name].address}:{PORT}" for name in self.names]
        file = self.folder / "haproxy.cfg"
        file.write_text(HAPROXY.format(address="{}:{}".format(*self.address), servers="\n".join(servers)))
        command = self.hosts["front"].command(require_haproxy(), "-db", "-f", str(file))
        with (self.folder / "haproxy.log").open("wb") as log:
            haproxy = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._stack.callback(haproxy.wait, 10)
        self._stack.callback(haproxy.kill)

    # -- What it says of itself -----------------------------------------------------------------------------------

    def records(self) -> list[dict[str, Any]]:
        """What replicas publish in etcd; raises where etcd does not answer."""
        return [json.loads(value) for value in self._values("replicas")]

    def pid_of(self, stage: int, side: str) -> int:
        """The process of a replica."""
        (pid,) = (each["pid"] for each in self.records() if (each["stage_id"], each["host"]) == (stage, side))
        return int(pid)

    def keys(self) -> list[str]:
        """The keys of replicas, hubs and beats: those that end with their processes."""
        folders = ("replicas", "hubs", "beats")
        return [key for folder in folders for key in self.etcdctl("get", "--keys-only", *_prefix(folder)).split()]

    def _values(self, folder: str) -> list[str]:
        return self.etcdctl("get", "--print-value-only", *_prefix(folder)).splitlines()

    def etcdctl(self, *arguments: str) -> str:
        """What etcdctl prints, asked of all members."""
        return etcdctl(self.endpoints, "--dial-timeout=1s", "--command-timeout=3s", *arguments)

    def lack(self) -> str:
        """What is missing to a site where all is well; empty if nothing is."""
        for name, hub in self.hubs.items():
            figures = figures_of(hub.url)
            if figures is None:
                return f"hub {name} does not answer"
            for what, expected in _WHOLE.items():
                if figures.get(what) != expected:
                    return f"hub {name}: {what} is {figures.get(what)}, not {expected}"
        return ""

    def lack_in_registry(self) -> str:
        """The same of etcd, which is asked less often: its members, and who is registered there."""
        try:
            self.cluster.wait_serving(timeout_s=0.0)
            up = sorted((each["stage_id"], each["host"]) for each in self.records() if each["status"] == "up")
            hubs = len(self._values("hubs"))
        except (subprocess.SubprocessError, AssertionError) as error:
            return f"etcd: {error}"
        if up != sorted((stage, side) for stage in STAGES for side in SIDES):
            return f"registered: {up}"
        return "" if hubs == len(self.names) else f"{hubs} hubs are registered"

    def under_way(self) -> str:
        """What hubs and replicas still have of requests; empty if nothing."""
        urls = [hub.url for hub in self.hubs.values()]
        urls += [f"http://{self.hosts[side].address}:{METRICS_PORT + stage}" for stage, side in self.supervisors]
        for url in urls:
            figures = figures_of(url) or {"it answers": 0.0}
            held = {name: value for name, value in figures.items() if name.partition("{")[0] in _UNDER_WAY and value}
            if held or "it answers" in figures:
                return f"{url}: {held}"
        return ""

    def processes(self) -> dict[int, tuple[str, int, int]]:
        """Hubs and replicas by process id: who it is, its descriptors, and the files in its /dev/shm."""
        found = {hub.process.pid: f"hub {name}" for name, hub in self.hubs.items()}
        found |= {each["pid"]: f"replica {each['stage_id']} {each['host']}" for each in self.records()}
        return {
            pid: (who, _entries(f"/proc/{pid}/fd"), _entries(f"/proc/{pid}/root/dev/shm")) for pid, who in found.items()
        }

    def logs(self) -> list[Path]:
        """Logs of hubs, of all their lives."""
        return [*self.former, *(hub.log for hub in self.hubs.values())]

    def all_logs(self) -> list[Path]:
        """All that hubs and supervisors have ever said."""
        return sorted(self.folder.glob("*/*.log"))

    def make_room(self) -> None:
        """What an operator does once etcd's history is compacted: its members give back what is free, and take keys."""
        for member in self.cluster.members:
            etcdctl(member.endpoint, "defrag")
        self.etcdctl("alarm", "disarm")

    # -- What can be done to it -----------------------------------------------------------------------------------

    def nft(self, host: str, rules: str) -> None:
        """Set a host's packet filter to the rules of its hooks ``in`` and ``out``, as ``in ip saddr 10.0.0.1 drop``."""
        chains = {"in": "input", "out": "output"}
        lines = ["table inet fault {}", "delete table inet fault", "table inet fault {"]
        for name, hook in chains.items():
            mine = [rule.split(maxsplit=1)[1] for rule in rules.splitlines() if rule.split(maxsplit=1)[:1] == [name]]
            lines += [f"chain {name} {{ type filter hook {hook} priority 0;", *mine, "}"]
        self._nft(host, "\n".join([*lines, "}"]))

    def nft_clear(self, host: str) -> None:
        """Undo ``nft``."""
        self._nft(host, "table inet fault {}\ndelete table inet fault")

    def _nft(self, host: str, text: str) -> None:
        command = ["ip", "netns", "exec", self.hosts[host].namespace, "nft", "-f", "-"]
        subprocess.run(command, input=text, text=True, check=True, capture_output=True, timeout=20)

    def _stop_processes(self) -> None:
        children = [*self.supervisors.values(), *self.hubs.values()]
        for pid in [pid for child in children for pid in child.tree()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        # All at once, and each only once: a second SIGTERM ends a process without its drain.
        with ThreadPoolExecutor(len(children)) as threads:
            for left in threads.map(Child.stop, children):
                self.left += left

    def stop(self) -> list[str]:
        """End all processes by SIGTERM; return what is wrong with that, and what stays in the registry."""
        trees = [pid for child in [*self.hubs.values(), *self.supervisors.values()] for pid in child.tree()]
        self._stop_processes()
        wrong = [f"process {pid} had to be killed" for pid in self.left]
        wrong += [f"process {pid} is left" for pid in alive(trees)]
        wrong += [f"key {key} is left" for key in self.keys()]
        children: Sequence[Child] = [*self.hubs.values(), *self.supervisors.values()]
        wrong += [f"exit code {each.process.returncode}: {each.log}" for each in children if each.process.returncode]
        return wrong


#: What a hub's metrics show when all is well.
_WHOLE: Final = (
    {f'omni_hub_replicas_pickable{{stage="{stage}"}}': float(len(SIDES)) for stage in STAGES}
    | {f'omni_hub_replicas_registered{{stage="{stage}"}}': float(len(SIDES)) for stage in STAGES}
    | {"omni_hub_view_stale_seconds": 0.0}
)
_UNDER_WAY: Final = {
    "omni_hub_requests_in_flight",
    "omni_hub_requests_waiting",
    "omni_hub_clients_behind",
    "omni_replica_requests_in_flight",
    "omni_replica_credits_used",
}


def figures_of(url: str) -> dict[str, float] | None:
    """All metrics of a hub or a supervisor; None while it does not answer within 2 s."""
    try:
        with _opener().open(f"{url}/metrics", timeout=2.0) as response:
            text = response.read().decode()
    except OSError:
        return None
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("omni_"))
    return {name: float(value) for name, _, value in lines}


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    # What the environment says of proxies is not for these.
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def _prefix(folder: str) -> tuple[str, str]:
    return "--prefix", f"/omni/v1/{NAMESPACE}/{folder}/"
