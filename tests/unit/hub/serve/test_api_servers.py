"""The further API servers of a hub: which flags they take over, and when each is started and stopped."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hub.api.door.config import DoorConfig, OwnPort
from hub.api.door.keys import read_key
from hub.command import ServeCommand
from hub.serve import api_servers
from hub.serve.api_servers import ApiServers, ServerOptions, without_first
from hub.serve.flags import check_flags, check_servers_with
from omni_discovery.commands.stage_options import open_config, read_config
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.config import RegistrySecurity
from omni_discovery.stories import Waits
from tests.support.hub_fakes import ONE_STAGE, deploy_of
from tests.support.serving import serve_config

VIDEO = "{stages: [{stage_id: 0, engine: diffusion, model: m, final_output: video}]}"
OPTIONS = ServerOptions(
    number=1,
    parent_pid=1,
    ready_fd=0,
    port=8001,
    endpoints="unix:///run/etcd:2379",
    is_embedded=True,
    security=RegistrySecurity(user="omni", password="secret"),
    document=b"{}",
    keys=(read_key("alice", "key-of-alice", "here"),),
    metrics_moved=True,
)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m", "--api-server-count", "0"], "must be at least 1 and at most 64, not 0"),
        (["m", "-asc", "65"], "must be at least 1 and at most 64, not 65"),
        (
            ["--headless", "--stage-id", "0", "--etcd-endpoints", "e:1", "--api_server_count", "2"],
            "--headless has no HTTP API: leave out --api-server-count",
        ),
    ],
)
def test_a_number_of_servers_that_there_cannot_be_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_flags(parsed(*words))


@pytest.mark.parametrize(
    ("words", "document", "variables", "said"),
    [
        ([], VIDEO, {}, "without --job-store, a video would be at one of the 2 API servers only"),
        (["--api", "vllm"], ONE_STAGE, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}, "an adapter that a client loads"),
        (["--api", "vllm"], ONE_STAGE, {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}, "a stored response would be known"),
    ],
)
def test_what_only_one_server_would_know_is_refused(
    words: list[str], document: str, variables: dict[str, str], said: str
) -> None:
    deploy, alone = deploy_of(document), parsed("m", *words)
    check_servers_with(alone, deploy, variables)
    with pytest.raises(ConfigError, match=said):
        check_servers_with(parsed("m", *words, "--api-server-count", "2"), deploy, variables)


def test_what_all_servers_know_is_taken() -> None:
    two = ("m", "--api-server-count", "2")
    check_servers_with(parsed(*two, "--job-store", "/jobs"), deploy_of(VIDEO), {})
    check_servers_with(parsed(*two), deploy_of(ONE_STAGE), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})
    check_servers_with(parsed(*two, "--api", "vllm"), deploy_of(ONE_STAGE), {"VLLM_ENABLE_RESPONSES_API_STORE": "0"})


def test_a_further_server_leaves_to_the_first_what_only_that_does() -> None:
    words = "--stage-id 0 --omni-dp-size-local 2 --admin-port 9000 --metrics-port 9001 --init-timeout 5 --port 0"
    given = parsed("m", *words.split(), "--api-key-file", "gone", "--max-in-flight", "7")
    without_first(given, OPTIONS)
    assert (given.hub_only, given.stage_id, given.omni_dp_size_local) == (True, None, None)
    assert (given.port, given.etcd_endpoints) == (8001, "unix:///run/etcd:2379")
    assert (given.admin_port, given.metrics_port, given.init_timeout) == (0, None, None)
    assert given.api_key_file == []
    assert given.max_in_flight == 7


def test_a_further_server_has_the_keys_of_the_first_and_shows_no_metrics_that_it_hides() -> None:
    read = read_config(os.dup(open_config(OPTIONS)), ServerOptions)
    assert read == OPTIONS
    door = read.door(DoorConfig(admin=OwnPort("127.0.0.1", 0)))
    assert door.asks_for_key
    assert door.keys[0].name == "alice"
    assert door.metrics_moved
    assert door.metrics is None


class Now:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


#: Says that it listens and waits; ends with code 0 when it is told to. Its options stand behind the flag.
CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(float(os.environ["SLOW_S"])), os._exit(0)))
from hub.serve.api_servers import ServerOptions, tell_ready
from omni_discovery.commands.stage_options import read_config
tell_ready(read_config(int(sys.argv[-1]), ServerOptions))
time.sleep(600)
"""


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ApiServers:
    """Two further servers whose processes are real and do nothing."""
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", CHILD])
    monkeypatch.setenv("SLOW_S", "0")
    config = replace(serve_config(tmp_path, "e:1", "test", 2.0), api_servers=3)
    releases: Any = SimpleNamespace(document=b"{}")
    return ApiServers(config, "e:1", 8001, releases, now=Now())


async def until_ready(servers: ApiServers) -> dict[int, int]:
    """The processes by number, once all listen."""
    async with asyncio.timeout(60.0):
        while servers.missing() or any(each.up_since_s is None for each in servers._servers):
            servers.restart_ended()
            await asyncio.sleep(0.02)
    return {each.number: each.child.pid for each in servers._servers if each.child}


async def ended(servers: ApiServers, number: int) -> None:
    """Wait until the end of a server's process was seen."""
    async with asyncio.timeout(60.0):
        while servers._servers[number - 1].child is not None:
            servers.restart_ended()
            await asyncio.sleep(0.02)


async def test_one_that_is_killed_is_started_again_after_a_pause_that_grows(servers: ApiServers) -> None:
    """1. two servers start, and both are missed until they listen
    2. one is killed, twice: it comes back after 0.5 s, then after 1 s; the other is not touched
    3. it is told to stop by an operator: that is no crash, and it comes back after 0.5 s
    """
    servers.start()
    assert servers.missing() == "API servers 1, 2 do not listen yet"
    first = await until_ready(servers)
    assert set(servers.asks()) == {1, 2}
    clock: Any = servers._now
    for number, pause_s in ((signal.SIGKILL, 0.5), (signal.SIGKILL, 1.0), (signal.SIGTERM, 0.5)):
        os.kill(servers._servers[0].child.pid, number)  # type: ignore[union-attr]
        await ended(servers, 1)
        assert set(servers.asks()) == {2}
        assert servers._servers[0].start_at_s == clock.now_s + pause_s
        assert not servers.missing(), "it has listened before: the hub is ready with the others"
        clock.now_s += pause_s
        again = await until_ready(servers)
        assert again[1] != first[1]
        assert again[2] == first[2]
    await servers.stop()


async def test_one_that_ends_again_and_again_is_seen_to_wait_until_it_listens(
    servers: ApiServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. a server is killed, and its next two processes end at once: one wait, that has its first beginning
    2. the next one listens: the wait is over
    """
    wall_s = iter(range(100))
    waits = servers._waits = Waits(tmp_path, "test", "e:1", lambda: next(wall_s))
    servers.start()
    await until_ready(servers)
    clock: Any = servers._now
    with monkeypatch.context() as patched:
        patched.setattr(sys, "orig_argv", [sys.executable, "-c", "raise SystemExit(3)"])
        os.kill(servers._servers[0].child.pid, signal.SIGKILL)  # type: ignore[union-attr]
        for _ in range(3):
            await ended(servers, 1)
            (wait,) = waits._waits.values()
            assert wait.since_s == 0
            assert wait.who == "API server 1 of a hub"
            clock.now_s += 60.0
            servers.restart_ended()
        assert "exit code 3" in wait.reason
    await ended(servers, 1)
    clock.now_s += 60.0
    await until_ready(servers)
    assert not waits._waits
    await servers.stop()


async def test_the_last_is_told_to_stop_when_the_one_before_has_or_its_share_of_the_time_is_over(
    servers: ApiServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. each takes 0.6 s to stop: one begins when the other is done; 2. with a share of 0.1 s, both go together"""
    monkeypatch.setenv("SLOW_S", "0.6")
    servers._now = asyncio.get_running_loop().time
    took_s = []
    for all_stopped_s in (60.0, 0.2):
        monkeypatch.setattr(api_servers, "_ALL_STOPPED_S", all_stopped_s)
        servers.start()
        await until_ready(servers)
        began_s = servers._now()
        with caplog.at_level("INFO"):
            await servers.stop()
        took_s.append(servers._now() - began_s)
    assert took_s[0] >= 1.2
    assert took_s[1] < took_s[0]
    stopped = [record.args for record in caplog.records if str(record.msg).startswith("api_server.stopped")]
    assert [(each[0], each[1]) for each in stopped[:2]] == [(1, 0), (2, 0)]  # type: ignore[index]


async def test_one_that_hangs_is_killed(
    servers: ApiServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLOW_S", "600")
    monkeypatch.setattr(api_servers, "_KILL_S", 0.3)
    servers._now = asyncio.get_running_loop().time
    servers.start()
    pids = await until_ready(servers)
    await servers.stop()
    assert [record.levelname for record in caplog.records if "api_server.killed" in record.message] == ["WARNING"] * 2
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_one_that_cannot_be_started_is_tried_again(
    servers: ApiServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        servers.start()
    assert [record.levelname for record in caplog.records if "api_server.not_started" in record.message] == [
        "ERROR"
    ] * 2
    clock: Any = servers._now
    clock.now_s += 0.5
    assert set(await until_ready(servers)) == {1, 2}
    await servers.stop()
