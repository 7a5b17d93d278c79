"""Hubs revoked by their control key: who hears of it, how soon, and what becomes of it when etcd is in trouble."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from omni_discovery import wire
from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord
from omni_discovery.view.table import live_hubs
from tests.support.processes import Child
from tests.support.registry import EtcdServer, etcdctl
from tests.support.replica_hub import eventually
from tests.support.replica_stage import Deployment, echo_stages

#: The promise is a second; starting etcdctl itself is not counted.
WITHIN_S = 1.0


class Scene:
    """A replica's client and two hubs'."""

    def __init__(self, endpoint: str, namespace: str, ttl_s: float = 5.0) -> None:
        self.endpoint, self.namespace = endpoint, namespace
        self.hubs: dict[str, OmniCoordClientForHub] = {}
        for hub_id in ("a", "b"):
            record = HubRecord(hub_id=hub_id, curve_public_key=hub_id)
            self.hubs[hub_id] = OmniCoordClientForHub(endpoint, namespace=namespace, ttl_s=ttl_s, hub=record)
        self._lock = threading.Lock()
        self.let_in: list[set[str]] = []
        self.shut_out: list[set[str]] = []
        self.replica = OmniCoordClientForStage(
            endpoint,
            "tcp://h:1",
            "tcp://h:2",
            0,
            namespace=namespace,
            ttl_s=ttl_s,
            on_hubs=self._take_hubs,
            on_revoked=self._take_revoked,
        )
        assert eventually(lambda: self.let_in[-1:] == [{"a", "b"}], 10.0)

    def _take_hubs(self, hubs: Mapping[str, HubRecord]) -> None:
        self.let_in.append(set(hubs))

    def _take_revoked(self, hub_ids: frozenset[str]) -> None:
        self.shut_out.append(set(hub_ids))

    def put(self, hub_id: str, value: str) -> None:
        etcdctl(self.endpoint, "put", keys.hub_control_key(self.namespace, hub_id), value)

    def close(self) -> None:
        self.replica.close()
        for hub in self.hubs.values():
            hub.close()


@pytest.fixture
def scene(endpoint: str, namespace: str) -> Iterator[Scene]:
    scene = Scene(endpoint, namespace)
    yield scene
    scene.close()


def test_replicas_and_the_hub_itself_learn_of_a_revocation_within_a_second_and_of_its_end(scene: Scene) -> None:
    """1. b is revoked with etcdctl: shut out, not let in; b knows it, and a counts one live hub
    2. nonsense takes its place: nothing changes; 3. the key is deleted: b is let in again
    """
    scene.put("b", '{"revoked": true}')
    began_s = time.monotonic()
    assert eventually(lambda: scene.shut_out == [{"b"}] and scene.let_in[-1] == {"a"}, WITHIN_S)
    assert eventually(lambda: scene.hubs["b"].revoked, WITHIN_S)
    assert time.monotonic() - began_s < WITHIN_S
    assert not scene.hubs["a"].revoked
    assert eventually(lambda: live_hubs(scene.hubs["a"].view()) == 1)
    scene.put("b", '{"revoked": "no"}')
    assert eventually(lambda: list(scene.hubs["a"].view().bad) == [keys.hub_control_key(scene.namespace, "b")])
    assert scene.hubs["b"].revoked
    assert (scene.shut_out, scene.let_in[-1]) == ([{"b"}], {"a"})
    etcdctl(scene.endpoint, "del", keys.hub_control_key(scene.namespace, "b"))
    assert eventually(lambda: scene.shut_out == [{"b"}, set()] and scene.let_in[-1] == {"a", "b"}, WITHIN_S)
    assert eventually(lambda: not scene.hubs["b"].revoked)


def test_a_replica_that_starts_later_never_lets_a_revoked_hub_in(scene: Scene) -> None:
    scene.put("b", '{"revoked": true}')
    assert eventually(lambda: scene.shut_out == [{"b"}])
    let_in: list[set[str]] = []
    with OmniCoordClientForStage(
        scene.endpoint, "i", "o", 0, namespace=scene.namespace, on_hubs=lambda hubs: let_in.append(set(hubs))
    ):
        assert eventually(lambda: bool(let_in))
        time.sleep(0.3)
    assert let_in == [{"a"}]


def test_a_revoked_hub_whose_key_expires_and_comes_back_stays_revoked(scene: Scene) -> None:
    scene.put("b", '{"revoked": true}')
    assert eventually(lambda: scene.shut_out == [{"b"}])
    scene.hubs["b"].close()
    assert eventually(lambda: set(scene.hubs["a"].view().hubs) == {"a"})
    record = HubRecord(hub_id="b", curve_public_key="b")
    scene.hubs["b"] = OmniCoordClientForHub(scene.endpoint, namespace=scene.namespace, hub=record)
    assert eventually(lambda: set(scene.hubs["a"].view().hubs) == {"a", "b"})
    time.sleep(0.3)
    assert (scene.shut_out, scene.let_in[-1]) == ([{"b"}], {"a"})


def test_a_wiped_etcd_lifts_a_revocation_only_a_ttl_after_it_is_back(tmp_path: Path) -> None:
    """1. b is revoked; etcd dies; 2. a new one without data takes its place: both hubs register, b stays shut out
    3. nobody revokes it anew within a TTL: it is let in
    """
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    server = EtcdServer(first)
    server.start()
    scene = Scene(server.endpoint, "n", ttl_s=2.0)
    try:
        scene.put("b", '{"revoked": true}')
        assert eventually(lambda: scene.shut_out == [{"b"}])
        server.kill()
        time.sleep(1.0)
        server._data = second / "data"
        began_s = time.monotonic()
        server.start()
        assert eventually(lambda: set(scene.hubs["a"].view().hubs) == {"a", "b"}, 10.0)
        assert (scene.shut_out, scene.let_in[-1]) == ([{"b"}], {"a"})
        assert eventually(lambda: scene.shut_out[-1] == set() and scene.let_in[-1] == {"a", "b"}, 15.0)
        assert time.monotonic() - began_s > 2.0
    finally:
        scene.close()
        server.kill()


def test_the_commands_revoke_show_and_allow(scene: Scene, tmp_path: Path) -> None:
    def omni(*arguments: str) -> tuple[int, str]:
        where = ["--etcd-endpoints", scene.endpoint, "--namespace", scene.namespace]
        child = Child([*arguments, *where], tmp_path, "omni")
        return child.process.wait(60), child.text

    code, text = omni("hub", "revoke", "b")
    assert code == 0, text
    assert "is revoked" in text
    assert eventually(lambda: scene.let_in[-1] == {"a"}, WITHIN_S)
    code, text = omni("hubs")
    assert code == 0, text
    assert "revoked" in next(line for line in text.splitlines() if line.strip().startswith("b "))
    code, text = omni("doctor")
    assert "hub b is revoked and still registered" in " ".join(text.split())
    code, text = omni("hub", "revoke", "c")
    assert code == 2
    assert "there are: a, b" in text
    code, text = omni("hub", "allow", "b")
    assert code == 0, text
    assert eventually(lambda: scene.let_in[-1] == {"a", "b"}, WITHIN_S)


def test_the_commands_say_the_same_of_an_etcd_that_is_not_there(tmp_path: Path) -> None:
    commands = (["hubs"], ["hub", "allow", "a"], ["cordon", "0/0"], ["history"])
    children = [
        Child([*arguments, "--etcd-endpoints", "127.0.0.1:9"], tmp_path, arguments[0] + str(len(arguments)))
        for arguments in commands
    ]
    for arguments, child in zip(commands, children, strict=True):
        assert child.process.wait(60) == 1
        (line,) = child.text.splitlines()
        assert line.startswith("omni: no etcd answered within 5 s: start it, or correct --etcd-endpoints"), arguments


@pytest.mark.attack("C8")
def test_a_revoked_hub_with_a_session_is_cut_off_and_what_it_had_running_ends(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. a hub has a session and a request that takes long; it is revoked
    2. within a second the request is gone, and nothing it says is answered; 3. allowed again, it is served
    """
    with Deployment(endpoint, namespace, echo_stages({"delay_s": 0.02}), tmp_path) as deployment:
        deployment.start()
        (replica,) = deployment.wait_up()
        hub = deployment.session(replica)
        hub.submit("r", " ".join(["word"] * 1000))
        hub.acknowledged()
        key = keys.hub_control_key(namespace, "hub-1")
        etcdctl(endpoint, "put", key, '{"revoked": true}')
        time.sleep(WITHIN_S)
        while hub.output.poll(0):
            hub.output.recv_multipart()
        hub.submit("r2", "x")
        assert hub.hears_nothing(1.0)
        assert eventually(lambda: [info.queue_length for info in deployment.replicas()] == [0])
        stranger = deployment.hub(replica)
        stranger.input.send(wire.encode(wire.Hello(hub_id="hub-1", epoch=replica.epoch)))
        assert stranger.hears_nothing(0.7)
        etcdctl(endpoint, "del", key)
        time.sleep(WITHIN_S)
        again = deployment.session(replica)
        again.submit("r3", "x")
        assert isinstance(again.acknowledged(), wire.Accepted)
