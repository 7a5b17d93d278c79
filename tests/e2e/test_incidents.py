"""Incidents, each made with real processes: ``omni status`` names its cause, with the command that mends it.

``omni why`` names it, too, for the replica that gets nothing and the requests that suffer.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from omni_discovery.etcd.embedded import find_binary
from tests.support.attackers import Attacker
from tests.support.binaries import absent
from tests.support.host_etcd import REGISTRY_PORT
from tests.support.hub import Hub, asking
from tests.support.netns import require_netns
from tests.support.processes import DEFAULTS, OMNI, Child, wait_for
from tests.support.registry import EtcdServer
from tests.support.running_scenarios import COUNTS, ECHO, PARTS, on_hosts

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LONG = pytest.mark.skipif(not os.environ.get("OMNI_LONG"), reason="the long form: make long")
#: The cause of an incident has to be named within so many seconds.
_NAMED_WITHIN_S: Final = 60.0
DOCUMENT: Final = """
model: echo-pair
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 2, delay_s: 0.05}, runtime: {num_replicas: 2},
     final_output: text}
  - {stage_id: 1, engine: echo, engine_args: {modality: image}, runtime: {num_replicas: 1}, final_output: image}
edges: [{from: 0, to: 1, connector: shm}]
connectors: {shm: {name: SharedMemoryConnector, extra: {shm_threshold_bytes: 0}}}
"""
OTHER: Final = DOCUMENT.replace("capacity: 2", "capacity: 3")
#: A screen is kept here, for the page that shows them.
SCREENS: Final = os.environ.get("OMNI_SCREENS", "")


class SmallMemory:
    """A shared memory of 1 MiB for those who are started with its ``prefix``; needs root."""

    def __init__(self, folder: Path) -> None:
        script = "mount -t tmpfs -o size=1m tmpfs /dev/shm && echo made && exec sleep infinity"
        self._holder = subprocess.Popen(["unshare", "-m", "sh", "-c", script], stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"made\n":
            absent("a file system of its own needs root")
        self.prefix = ("nsenter", "-t", str(self._holder.pid), "-m", f"--wd={folder}", "--")
        self._ballast = Path(f"/proc/{self._holder.pid}/root/dev/shm/ballast")

    def fill(self) -> None:
        """Somebody else takes all that is free."""
        with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """He gives it back."""
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """End it with the last who uses it."""
        self._holder.kill()
        self._holder.communicate()


class Cluster:
    """An etcd, a hub without stages, and a supervisor for each stage."""

    def __init__(self, folder: Path, memory: SmallMemory) -> None:
        self.folder = folder
        self.memory = memory
        self.server = EtcdServer(folder)
        self.server.start()
        self.flags = ["--etcd-endpoints", self.server.endpoint]
        self.hub = Hub.of_yaml(folder, DOCUMENT, "--hub-only", "--max-waiting", "4", *self.flags)
        self.children: list[Child] = [self.hub]
        for stage_id, count in ((0, 2), (1, 1)):
            self.children.append(self.headless(stage_id, count))
        self.hub.wait_ready()
        wait_for("all replicas to be up", lambda: self.up() == {"0/0", "0/1", "1/0"})

    def headless(self, stage_id: int, count: int, *more: str) -> Child:
        """A supervisor of so many replicas."""
        words = ["serve", "--headless", "--stage-id", str(stage_id), "--omni-dp-size-local", str(count)]
        words += ["--namespace", self.hub.namespace, *self.flags, *more]
        return Child(words, self.folder, f"stage{stage_id}-{len(more)}", prefix=self.memory.prefix)

    def omni(self, *words: str) -> str:
        """Run a command of ``omni`` with the flags of this registry; return what it prints."""
        return said([*OMNI, *words, "--namespace", self.hub.namespace, *self.flags], self.folder)[1]

    def up(self) -> set[str]:
        """The names of the replicas that are up."""
        return {f"{each['stage_id']}/{each['replica_id']}" for each in self.records() if each["status"] == "up"}

    def records(self) -> list[dict[str, Any]]:
        """The records of all replicas."""
        return [json.loads(line) for line in self.omni("replicas", "--json").splitlines() if line.startswith("{")]

    def status(self) -> Screen:
        """The screen of this moment, as on a terminal of 80 columns."""
        return Screen.taken([*OMNI, "status", "--namespace", self.hub.namespace, *self.flags], self.folder)

    def paste(self, screen: Screen, begins: str) -> str:
        """Run a command of the screen in a shell, as who pastes it would; return what it prints."""
        lines = screen.commands(begins)
        omni = f'omni() {{ {shlex.join(OMNI)} "$@"; }}; '
        etcdctl = str(find_binary(None).with_name("etcdctl"))
        script = f'{omni} etcdctl() {{ {shlex.quote(etcdctl)} "$@"; }}; {lines}'
        return said(["bash", "-ec", script], self.folder)[1]

    def why(self, *words: str, names: Sequence[str]) -> str:
        """What ``omni why`` prints once it says all of this."""
        return told([*OMNI, "why", *words, "--namespace", self.hub.namespace], self.folder, names)

    def stop(self) -> list[int]:
        """Stop all; return what is left."""
        left = [pid for child in reversed(self.children) for pid in child.stop()]
        self.server.kill()
        return left


def said(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a short command in a folder; return its exit code and what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in DEFAULTS}
    environment |= {"XDG_RUNTIME_DIR": str(folder), "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    return done.returncode, done.stdout.decode() + done.stderr.decode()


def told(command: list[str], folder: Path, names: Sequence[str]) -> str:
    """What a command prints once it says all of this; fails if it does not within a minute."""
    deadline_s = time.monotonic() + _NAMED_WITHIN_S
    while True:
        began_s = time.monotonic()
        text = said(command, folder)[1]
        now_s = time.monotonic()
        if all(name in " ".join(text.split()) for name in names):
            assert all(len(line) <= 80 or line.startswith("omni: ") for line in text.splitlines()), text
            _keep_text(f"$ omni {shlex.join(command[command.index(OMNI[2]) + 1 :])}\n{text}{now_s - began_s:.1f} s\n\n")
            return text
        assert now_s < deadline_s, f"wanted {names}:\n{text}"
        time.sleep(0.3)


class Screen:
    """What ``omni status`` has printed, and its exit code."""

    def __init__(self, code: int, text: str, took_s: float) -> None:
        self.code = code
        self.text = text
        self.took_s = took_s

    @classmethod
    def taken(cls, command: list[str], folder: Path) -> Screen:
        """Run the command."""
        began_s = time.monotonic()
        code, text = said(command, folder)
        return cls(code, text, time.monotonic() - began_s)

    @property
    def flat(self) -> str:
        """The text without its line breaks."""
        return " ".join(self.text.replace("\\\n", " ").split())

    def commands(self, begins: str) -> str:
        """The first block of commands one of which begins so, as it is pasted."""
        block: list[str] = []
        for line in [*self.text.splitlines(), ""]:
            if line.startswith("      "):
                block.append(line.strip(" "))
            elif any(each.startswith(begins) for each in block):
                return "\n".join(block)
            else:
                block = []
        raise AssertionError(f"no command begins with {begins!r}:\n{self.text}")


def named(take: Callable[[], Screen], *words: str, code: int = 1) -> Screen:
    """The first screen with this exit code that says all of this; fails if none does within a minute."""
    deadline_s = time.monotonic() + _NAMED_WITHIN_S
    while True:
        screen = take()
        if screen.code == code and all(word in screen.flat for word in words):
            _keep(screen)
            assert all(len(line) <= 80 for line in screen.text.splitlines()), screen.text
            return screen
        assert time.monotonic() < deadline_s, f"code {screen.code}, wanted {code} and {words}:\n{screen.text}"
        time.sleep(0.3)


def _keep(screen: Screen) -> None:
    _keep_text(f"{screen.text}exit code {screen.code}, {screen.took_s:.1f} s\n\n")


def _keep_text(text: str) -> None:
    if SCREENS:
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].split()[0]
        with Path(SCREENS, f"{test}.txt").open("a") as file:
            file.write(text)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("night")
    memory = SmallMemory(folder)
    running = Cluster(folder, memory)
    try:
        yield running
    finally:
        left = running.stop()
        memory.close()
    assert left == []


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """All is well at the beginning of each test."""
    named(shared.status, "nothing needs you", code=0)
    return shared


def test_a_poisoned_record_is_named_and_the_pasted_command_deletes_it(cluster: Cluster) -> None:
    """Its key is such that a shell would run a part of it, if it were pasted without quotes."""
    proof = cluster.folder / "ran"
    key = f"/omni/v1/{cluster.hub.namespace}/replicas/0/7;touch {proof.name}"
    cluster.server.etcdctl("put", key, "{not json")
    screen = named(cluster.status, "record:", "replicas/0/7;touch ran", "etcdctl del")
    cluster.why("0/7", names=["this hub knows no replica 0/7; it knows 0/0, 0/1", "replicas/0/7;touch ran: is not the"])
    cluster.paste(screen, "eval")
    named(cluster.status, "nothing needs you", code=0)
    assert not proof.exists()


def test_a_record_that_is_no_json_is_named_by_the_name_of_its_replica(cluster: Cluster) -> None:
    key = f"/omni/v1/{cluster.hub.namespace}/replicas/1/2"
    cluster.server.etcdctl("put", key, "{not json")
    try:
        cause = f"the record of replica 1/2 is refused: {key}: JSON is malformed"
        screen = named(cluster.status, "one thing needs you", cause, f"etcdctl del {key}")
        text = cluster.why("1/2", names=["this hub knows no replica 1/2; it knows 1/0", cause])
        assert f"etcdctl del {key}" in text
        assert "etcd says" not in cluster.why("1/0", names=["replica 1/0 on"]), "that of another"
        cluster.paste(screen, "eval")
    finally:
        cluster.server.etcdctl("del", key)
    named(cluster.status, "nothing needs you", code=0)


def test_a_revoked_hub_that_still_runs_is_named_and_the_pasted_command_lets_it_in(cluster: Cluster) -> None:
    (hub,) = [json.loads(line)["hub_id"] for line in cluster.omni("hubs", "--json").splitlines()]
    cluster.omni("hub", "revoke", hub)
    screen = named(cluster.status, f"hub {hub} is revoked and still registered", f"omni hub allow {hub}")
    status, answer = cluster.hub.ask("nobody listens")
    assert (status, "this hub is revoked" in answer["error"]["message"]) == (503, True), answer
    for question in ("0/0", "--waiting", "--last-failures"):
        cluster.why(question, names=[f"hub {hub} is revoked and still registered", f"omni hub allow {hub}"])
    cluster.paste(screen, "omni hub allow")
    named(cluster.status, "nothing needs you", code=0)


def test_two_documents_are_named_with_each_replica_that_runs_the_older_one(cluster: Cluster) -> None:
    before = cluster.omni("pipeline", "show")
    for name, text in (("other", OTHER), ("before", before)):
        (cluster.folder / f"{name}.yaml").write_text(text)
    cluster.omni("pipeline", "apply", "other.yaml")
    try:
        screen = named(
            cluster.status, "replica 0/0", "it runs another deploy document than the one in force", "omni drain 0/0"
        )
        assert "so with 0/1" in screen.flat
        cluster.why("0/1", names=["replica 0/1 on", "another deploy document than the one in force", "omni drain 0/1"])
        assert "etcd says" not in cluster.why("1/0", names=["replica 1/0 on"]), "its part of the document is the same"
    finally:
        cluster.omni("pipeline", "apply", "before.yaml")
    named(cluster.status, "nothing needs you", code=0)


def test_an_etcd_that_stands_still_is_named_in_three_seconds_and_nothing_is_said_to_be_zero(cluster: Cluster) -> None:
    cluster.server.signal(signal.SIGSTOP)
    try:
        screen = named(cluster.status, "does not answer", "stages, replicas and hubs of", "etcdctl endpoint", code=2)
        assert cluster.hub.ask("still there")[0] == 200
        cluster.why("--waiting", names=["nothing waits", "etcd says:", "does not answer: it takes connections"])
    finally:
        cluster.server.signal(signal.SIGCONT)
    assert "busy" not in screen.text
    assert "nothing needs you" not in screen.text
    named(cluster.status, "nothing needs you", code=0)


@LONG
def test_an_etcd_without_a_quorum_is_named_with_the_members_that_are_missing(tmp_path: Path) -> None:
    """1. two of three members are killed: status names them, and the hub goes on
    2. they come back: nothing needs you
    """
    servers = EtcdServer.started_cluster(tmp_path, 3)
    endpoints = ",".join(server.endpoint for server in servers)
    hub = Hub.of_yaml(tmp_path, DOCUMENT, "--etcd-endpoints", endpoints)
    try:
        hub.wait_ready()
        command = [*OMNI, "status", "--namespace", hub.namespace, "--etcd-endpoints", endpoints]
        for server in servers[:2]:
            server.kill()
        missing = [server.endpoint for server in servers[:2]]
        named(
            lambda: Screen.taken(command, tmp_path),
            f"etcd has lost its quorum: {servers[2].endpoint} can't find a leader",
            f"start {', '.join(missing)} again",
            code=2,
        )
        assert hub.ask("still there", modalities=["text"])[0] == 200
        why = [*OMNI, "why", "--waiting", "--namespace", hub.namespace]
        told(why, tmp_path, ["nothing waits", "etcd has lost its quorum", f"start {', '.join(missing)} again"])
        EtcdServer.start_all(servers[:2])
        named(lambda: Screen.taken(command, tmp_path), "nothing needs you", code=0)
    finally:
        hub.stop()
        for server in servers:
            server.kill()


def test_lost_credits_are_named_with_their_replica_and_the_hub_that_lost_them(cluster: Cluster) -> None:
    """1. a second hub loses what it is lent: its request waits beside idle slots, and that is named
    2. it is ended: its credits are lent to the other hub again, and nothing needs anybody
    """
    leaky = Hub(cluster.folder, ["--hub-only", *cluster.flags], module="tests.support.leaky_hub", name="leaky")
    try:
        leaky.url = wait_for("the second hub to listen", leaky._listening, 60)
        client = threading.Thread(target=leaky.ask, args=("lost",), kwargs={"modalities": ["text"], "timeout": 50.0})
        client.start()
        screen = named(cluster.status, "slots serve nobody", "lent to it", "omni drain 0/")
        cluster.why("--waiting", names=["2 without a credit of this hub, though it reports free slots"])
        assert "its record says: 2 of its 2 slots serve nobody" in " ".join(cluster.paste(screen, "omni why").split())
        assert "overloaded" not in screen.text
    finally:
        leaky.stop()
    client.join(60)
    named(cluster.status, "nothing needs you", code=0)


@LONG
def test_a_client_that_reads_slowly_is_named_and_the_pasted_command_shows_its_request(cluster: Cluster) -> None:
    """It takes a little of its answer now and then: so slowly that what is buffered on its way is full."""
    # Together more than the kernel's buffers hold.
    words = " ".join(["x" * 100_000] * 28)
    body = {"messages": [{"role": "user", "content": words}], "modalities": ["text"], "stream": True, "n": 4}
    with closing(Attacker(cluster.hub.url, receive_buffer=4096)) as client:
        client.request(json.dumps(body).encode(), x_request_id="slow-reader")
        screen = named(cluster.status, "a client that reads too slowly", "omni why --waiting")
        cluster.why("--waiting", names=["its client, which does not read", "chatcmpl-"])
        assert "its client, which does not read" in " ".join(cluster.paste(screen, "omni why").split())
    named(cluster.status, "nothing needs you", code=0)


@LONG
def test_a_crash_loop_is_named_with_how_the_replica_ends(cluster: Cluster) -> None:
    """The first to be killed has been up for long, or not: from the sixth quick end on it is a crash loop."""
    stop = threading.Event()

    def kill() -> None:
        while not stop.is_set():
            for each in cluster.records():
                if each["stage_id"] == 1 and each["status"] == "up":
                    with suppress(ProcessLookupError):
                        os.kill(each["pid"], signal.SIGKILL)
            time.sleep(0.1)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        # Six starts, with pauses of 15 s in all between them.
        wait_for("the supervisor to give up", lambda: cluster.children[2].process.poll() is not None, 240)
        named(cluster.status, "s ago: it ended 6 times in a row soon after its start", "--stage-id 1")
        cause = "s ago: it ended 6 times in a row soon after its start: it was ended by SIGKILL"
        cluster.why("1/0", names=["this hub knows no replica 1/0; it knows none of that stage", cause, "--stage-id 1"])
        # A request that fails would be a need of the next test.
        cluster.why("--last-failures", names=["stage 1 has nobody who takes work", cause])
    finally:
        stop.set()
        killer.join(30)
    cluster.children.append(cluster.headless(1, 1, "--log-level", "info"))
    wait_for("stage 1 to serve again", lambda: "1/0" in cluster.up(), 60)


@LONG
def test_a_host_that_may_not_load_the_model_is_named_with_the_reason(cluster: Cluster) -> None:
    """A supervisor of another host finds no such model there, and ends: it is named from any machine."""
    folder = cluster.folder / "elsewhere"
    folder.mkdir()
    namespace = "models"
    document = "stages: [{stage_id: 0, engine: vllm, model: /models/not-here, final_output: text}]"
    (folder / "deploy.yaml").write_text(document)
    registry = ["--namespace", namespace, *cluster.flags]
    said([*OMNI, "pipeline", "apply", "deploy.yaml", *registry], folder)
    command = [*OMNI, "serve", "--headless", "--stage-id", "0", *registry]
    assert said(["unshare", "--uts", "sh", "-c", 'hostname gpu-2 && exec "$@"', "sh", *command], folder)[0] == 2
    screen = named(
        lambda: Screen.taken([*OMNI, "status", *registry], folder), "on gpu-2", "/models/not-here", "--stage-id 0"
    )
    assert "stage 0 has nobody" in screen.flat
    why = [*OMNI, "why", "0/0", *registry]
    told(why, folder, ["no hub of namespace 'models' runs here", "on gpu-2 ended", "/models/not-here is not on this"])


@LONG
def test_an_overloaded_stage_is_named_with_what_waits_and_what_was_refused(cluster: Cluster) -> None:
    with asking(cluster.hub, 24, "a b c d e f g h i j k l m n o p", modalities=["text"]):
        screen = named(
            cluster.status,
            *(
                "load: stage 0 is overloaded",
                "answered 429",
                "omni serve --headless --stage-id 0",
                "omni why --waiting",
            ),
        )
        cluster.why("--waiting", names=["at stage 0 for a free slot: of 2 replicas 2 full: all its slots are taken"])
        assert "at stage 0 for a free slot" in cluster.paste(screen, "omni why")


@LONG
def test_a_replica_that_is_several_times_slower_than_the_other_is_named(shared: Cluster) -> None:
    """It stands still for most of each second, as one whose device is shared or throttled."""
    (pid,) = [each["pid"] for each in shared.records() if (each["stage_id"], each["replica_id"]) == (0, 1)]
    with halting(pid), asking(shared.hub, 3, "a b", modalities=["text"]):
        screen = named(shared.status, "replica 0/1 is slow", "omni weight 0/1", "omni why 0/1")
        text = shared.why("0/1", names=["slow: its requests take", "omni weight 0/1 0.5"])
        assert "etcd says" not in text, "what led here is not said again"
        assert "slow: its requests take" in shared.paste(screen, "omni why")


def test_a_full_shared_memory_is_named_with_what_is_free_and_what_is_kept(shared: Cluster) -> None:
    """1. somebody fills the shared memory: hand-offs find no room, and the requests that need one fail
    2. that is named, and the pasted command shows the requests; 3. there is room again, and all goes on

    The last of those that share a cluster: it reports the failed requests for minutes.
    """
    shared.memory.fill()
    try:
        status, answer = shared.hub.ask("full", modalities=["image"])
        screen = named(
            shared.status, "can't hand over to 1: /dev/shm is full", "of 1 MiB, 0 B are free", "omni why --last"
        )
        assert (status, "could not store the hand-off" in answer["error"]["message"]) == (503, True), answer
        assert "could not store the hand-off" in " ".join(shared.paste(screen, "omni why").split())
        text = shared.why("--last-failures", names=["at last: SharedMemoryConnector could not store", "No space left"])
        shared.why(text.split()[2], names=["failed: SharedMemoryConnector could not store the hand-off for stage 1"])
    finally:
        shared.memory.free()
    wait_for("hand-offs to be stored", lambda: shared.hub.ask("free", modalities=["image"])[0] == 200)
    wait_for("the record to say so", lambda: not any(each["reason"] for each in shared.records()), 60)


@LONG
def test_a_host_that_is_cut_off_is_named_once_for_all_of_its_replicas(tmp_path: Path) -> None:
    require_netns()
    with on_hosts(tmp_path, "B", PARTS["B"], ECHO) as (_, client, network):
        client.wait_ready(COUNTS["B"])
        registry = network.hosts["registry"]
        endpoint = f"{registry.address}:{REGISTRY_PORT}"
        command = [*OMNI, "status", "--etcd-endpoints", endpoint]
        network.cut(network.hosts["painters"])
        named(
            lambda: Screen.taken(registry.command(*command), tmp_path), "host painters is down or cut off", "1/0, 1/1"
        )
        # Where the hub runs, for its user.
        why = network.hosts["hub"].command(*OMNI, "why", "1/0")
        told(why, tmp_path / "hub", ["why: without a session", "host painters is down or cut off", "1/0, 1/1"])


@contextmanager
def halting(pid: int) -> Iterator[None]:
    """A process stands still for most of each second."""
    stop = threading.Event()

    def halt() -> None:
        while not stop.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.9)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)

    thread = threading.Thread(target=halt)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
        os.kill(pid, signal.SIGCONT)
