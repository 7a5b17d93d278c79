"""Text in the registry that a terminal would obey, shown by the real commands on a terminal, and logged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records import keys
from tests.support.hub import Hub
from tests.support.processes import Child, wait_for
from tests.support.registry import EtcdServer, etcdctl
from tests.support.terminal import HOSTILE, obeyed, on_terminal

NAMESPACE = "n"
SAFE = {"schema": 1, "input_addr": "tcp://127.0.0.1:1", "output_addr": "tcp://127.0.0.1:2"}


def put(endpoint: str, *pairs: tuple[str, Any]) -> None:
    """Write keys as JSON, with characters of C1 and above as they are; None deletes one."""

    async def write() -> None:
        kv = EtcdKV(endpoint)
        try:
            for key, value in pairs:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                await (kv.delete(key) if value is None else kv.put(key, text.encode()))
        finally:
            await kv.close()

    asyncio.run(write())


def replica(replica_id: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    record = {**SAFE, "stage_id": 0, "replica_id": replica_id, "status": "up", **fields}
    return keys.replica_key(NAMESPACE, 0, replica_id), record


def fill(endpoint: str) -> None:
    """Every kind of key, and some that are none, with hostile text wherever text may stand."""
    texts = ("reason", "phase", "host", "device", "model", "version", "control_error", "dtype", "revision", "code")
    every = dict.fromkeys(texts, HOSTILE)
    prefix = keys.namespace_prefix(NAMESPACE)
    beat = {
        "counter": 1,
        "revision": 1,
        "written_at": 1.0,
        "health": {
            "requests": 3,
            "failures": [{"stage_id": 0, "failed": 3, "kinds": {HOSTILE: 3}, "last_at": 1.0}],
            "troubles": [
                {"stage_id": 0, "replica_id": 0, "epoch": epoch, "kind": kind, "reason": HOSTILE[:150], "host": HOSTILE}
                for epoch in (0, 7)
                for kind in ("ejected", "lost", HOSTILE)
            ],
        },
    }
    stage = {"stage_id": 0, "engine": "echo", "model": HOSTILE, "final_output": "text"}
    ended, record = replica(6, status="down", reason=HOSTILE, host=HOSTILE, pid=7)
    put(
        endpoint,
        replica(0, **every),
        replica(1, **every | {"status": "error"}),
        replica(2, **every | {"status": "starting", "cordoned": True}),
        replica(3, **dict.fromkeys(("input_addr", "output_addr"), HOSTILE), labels={HOSTILE: HOSTILE}),
        replica(4, connectors={"0-1": {"host": HOSTILE}, HOSTILE: {"host": "localhost"}}),
        replica(5, status=HOSTILE),
        (f"{prefix}replicas/{HOSTILE}/0", HOSTILE),
        (f"{prefix}hubs/{HOSTILE}", HOSTILE),
        (keys.hub_key(NAMESPACE, "h1"), {"hub_id": "h1", "host": HOSTILE, "address": HOSTILE, "version": HOSTILE}),
        (keys.hub_key(NAMESPACE, "h2"), {"hub_id": HOSTILE}),
        (keys.beat_key(NAMESPACE, "h1"), beat),
        (keys.replica_control_key(NAMESPACE, 0, 0), {HOSTILE: True}),
        (keys.replica_control_key(NAMESPACE, 0, 2), {"cordon": True}),
        (keys.replica_control_key(NAMESPACE, 0, 4), {"cordon": HOSTILE}),
        (keys.hub_control_key(NAMESPACE, "h3"), {"revoked": HOSTILE}),
        (
            keys.wait_key(NAMESPACE, "w"),
            {"host": HOSTILE, "pid": 1, "waits": [{"who": HOSTILE, "reason": HOSTILE, "since": 1.0}]},
        ),
        (keys.pipeline_key(NAMESPACE), {"model": "m", "stages": [stage]}),
        (f"{keys.ROOT}{HOSTILE}/replicas/0/0", "{}"),
        # A life that has ended with a reason.
        (ended, record),
        (ended, None),
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an etcd with such records."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    try:
        fill(server.endpoint)
        yield server.endpoint
    finally:
        server.kill()


@pytest.mark.attack("A18")
@pytest.mark.parametrize(
    "words",
    [
        ["replicas"],
        ["replicas", "--json"],
        ["hubs"],
        ["hubs", "--json"],
        ["doctor"],
        ["doctor", "--json"],
        ["history"],
        ["history", "--json"],
        ["pipeline", "show"],
        ["pipeline", "show", "--json"],
        ["pipeline", "apply", "new.yaml"],
        ["replicas", "--namespace", "empty"],
    ],
    ids=" ".join,
)
def test_a_command_shows_hostile_text_as_text(hostile: str, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "new.yaml").write_text("stages: [{stage_id: 0, engine: echo, final_output: image}]")
    flags = [] if "--namespace" in words else ["--namespace", NAMESPACE]
    text = on_terminal([*words, "--etcd-endpoints", hostile, *flags], tmp_path)
    assert "Traceback" not in text
    assert obeyed(text) == []
    assert "owned" in text, text
    if "--json" in words:
        read = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        assert read, "what is escaped is still JSON"


NEVER = (1e308, -1e308, 1e18)
FAR = ("tcp://127.0.0.1:99999", "tcp://127.0.0.1:-5", "tcp://[::1]:99999", "tcp://" + "a" * 4000 + ":1")
DEEP = '{"a":' * 400 + "1" + "}" * 400
#: What Python calls printable and no terminal shows.
UNSEEN = "\u034f\ufe0f\U000e0100\u180b\u17b4\u3164\u115f\uffa0\u2800" + "e" + "\u0301" * 60


@pytest.fixture(scope="module")
def breaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an etcd with records whose numbers, addresses and documents are none that anybody means."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    told = dict.fromkeys(("reason", "host", "device", "model"), f"owned {UNSEEN} owned")
    try:
        put(
            server.endpoint,
            *(replica(at, input_addr=each) for at, each in enumerate(FAR, 10)),
            *(replica(at, registered_at=each, updated_at=each) for at, each in enumerate(NEVER, 20)),
            replica(30, status="error", **told | {"reason": told["reason"] + "x" * 4000}),
            replica(31, queue_length=2**53 - 1, capacity=2**31 - 1),
            replica(32, connectors={"0-1": json.loads(DEEP)}),
            *((keys.hub_key(NAMESPACE, f"h{at}"), {"hub_id": f"h{at}", "started_at": t}) for at, t in enumerate(NEVER)),
            (keys.hub_key(NAMESPACE, "well"), {"hub_id": "well", "host": "gpu-1", "address": "http://10.0.0.1:8000"}),
            (keys.pipeline_key(NAMESPACE), DEEP),
            # Lives that have ended.
            *((replica(at)[0], None) for at in (20, 21, 22)),
            *((keys.hub_key(NAMESPACE, f"h{at}"), None) for at in (1,)),
        )
        yield server.endpoint
    finally:
        server.kill()


@pytest.mark.attack("D4")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["doctor"], "names no port"),
        (["doctor", "--json"], "names no port"),
        (["history"], "?"),
        (["history", "--json"], "1e308"),
        (["replicas"], "0/31"),
        (["replicas", "--json"], '"a":{"a":'),
        (["hubs"], "10.0.0.1:8000"),
        (["pipeline", "show"], '{"a":{"a":'),
        (["pipeline", "apply", "new.yaml"], "what was there could not be read"),
        (["pipeline", "apply", "deep.yaml"], "more than 64 levels"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_no_record_breaks_a_command(breaking: str, tmp_path: Path, words: list[str], told: str) -> None:
    (tmp_path / "new.yaml").write_text("stages: [{stage_id: 0, engine: echo, final_output: image}]")
    (tmp_path / "deep.yaml").write_text(f"stages: [{{stage_id: 0, engine: echo, engine_args: {DEEP}}}]")
    if words[0] == "pipeline":
        put(breaking, (keys.pipeline_key(NAMESPACE), DEEP))
    text = on_terminal([*words, "--etcd-endpoints", breaking, "--namespace", NAMESPACE], tmp_path)
    assert "Traceback" not in text, text[-2000:]
    assert told in " ".join(text.split()), text[:4000]
    assert obeyed(text) == []
    if "deep.yaml" in words:
        stored = etcdctl(breaking, "get", "--print-value-only", keys.pipeline_key(NAMESPACE))
        assert stored.strip() == DEEP, "nothing is written"


@pytest.mark.attack("D4")
def test_hub_and_replica_say_in_one_line_that_a_document_is_too_deep(server: EtcdServer, tmp_path: Path) -> None:
    """1. a hub and a replica run; 2. somebody replaces their pipeline; 3. a hub that starts then refuses it"""
    file = tmp_path / "one.yaml"
    file.write_text("stages: [{stage_id: 0, engine: echo, final_output: text}]")
    registry = ("--etcd-endpoints", server.endpoint)
    hub = Hub(tmp_path, ["--deploy-config", str(file), *registry], NAMESPACE)
    try:
        hub.wait_ready()
        put(server.endpoint, (keys.pipeline_key(NAMESPACE), DEEP))
        wait_for("the hub's line", lambda: "levels" in hub.text)
        child = Child(["serve", "--headless", "--stage-id", "0", *registry, "--namespace", NAMESPACE], tmp_path)
        assert child.process.wait(60) != 0
        assert "levels" in child.text
        assert "Traceback" not in child.text
    finally:
        hub.stop()
    assert "Traceback" not in hub.text


@pytest.mark.attack("A18")
def test_a_live_table_shows_hostile_text_as_text(hostile: str, tmp_path: Path) -> None:
    words = ["replicas", "--watch", "--etcd-endpoints", hostile, "--namespace", NAMESPACE]
    text = on_terminal(words, tmp_path, stop_at="owned")
    assert "owned" in text, text
    assert obeyed(text) == []


@pytest.mark.attack("A18")
def test_the_logs_of_a_hub_and_of_a_replica_show_hostile_text_as_text(server: EtcdServer, tmp_path: Path) -> None:
    """1. a hub and a replica of its pipeline run; 2. somebody fills their namespace; 3. both tell of it, as text"""
    file = tmp_path / "one.yaml"
    file.write_text("stages: [{stage_id: 0, engine: echo, final_output: text}]")
    registry = ("--etcd-endpoints", server.endpoint)
    hub = Hub(tmp_path, ["--deploy-config", str(file), *registry], NAMESPACE)
    try:
        hub.wait_ready()
        pipeline = etcdctl(server.endpoint, "get", "--print-value-only", keys.pipeline_key(NAMESPACE))
        fill(server.endpoint)
        put(server.endpoint, (keys.pipeline_key(NAMESPACE), pipeline.strip()))
        wait_for("the hub's line about a key", lambda: "is not the key of a replica or hub" in hub.text)
        wait_for("the replica's answer to its control key", lambda: "[replica 0/0]" in hub.text and "owned" in hub.text)
    finally:
        hub.stop()
    assert obeyed(hub.text) == []
    forged = [line for line in hub.text.splitlines() if line.startswith("2026-01-01 00:00:00 ERROR   forged.line")]
    assert forged == []
    # What the log has of it is worth its name.
    assert sum("owned" in line for line in hub.text.splitlines()) > 2, hub.text


@pytest.mark.attack("A18")
def test_errors_of_commands_show_hostile_text_as_text(hostile: str, tmp_path: Path) -> None:
    """A refused document: its error names what stands in it."""
    stage = {"stage_id": 0, "engine": "echo", "final_output": HOSTILE}
    put(hostile, (keys.pipeline_key("bad"), {"stages": [stage], HOSTILE: 1}))
    child = Child(
        ["serve", "--dry-run", "--headless", "--stage-id", "0", "--etcd-endpoints", hostile, "--namespace", "bad"],
        tmp_path,
    )
    assert child.process.wait(60) == 2
    assert "owned" in child.text
    assert obeyed(child.text) == []
