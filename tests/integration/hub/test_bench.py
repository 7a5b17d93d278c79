"""``omni bench`` beside real hubs: what it says is what was sent, and it goes on when the hub does not."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from omni_discovery.commands.bench import load
from omni_discovery.commands.bench.client import BenchClient, HubUnloadableError
from omni_discovery.commands.bench.command import BenchCommand, local_url
from omni_discovery.commands.bench.figures import BenchSummary
from omni_discovery.commands.bench.load import LoadRun
from omni_discovery.commands.bench.plan import Asking, LoadPlan
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records import keys
from tests.support.certificates import make_certificates
from tests.support.hub import Hub
from tests.support.processes import DEFAULTS, wait_for
from tests.support.speaking import DRAWER, SPEAKER, served

#: Two replicas that run one request each, a word in 0.02 s, and no room for more than two that wait.
DEPLOY = """
model: echo-one
stages:
  - stage_id: 0
    engine: echo
    engine_args: {capacity: 1, delay_s: 0.02}
    runtime: {num_replicas: 2}
    final_output: text
"""
KEY = "a-key-of-thirty-two-characters-x"
#: The command in a process of its own.
PROGRAM = """
import argparse, sys
from omni_discovery.commands.bench.command import BenchCommand, local_url
command, parser = BenchCommand(), argparse.ArgumentParser()
command.add_arguments(parser)
sys.exit(command.run(parser.parse_args()))
"""
BENCH = [sys.executable, "-c", PROGRAM]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "key").write_text(KEY + "\n")
    (folder / "key").chmod(0o600)
    running = Hub.of_yaml(folder, DEPLOY, "--max-waiting", "2", "--api-key-file", str(folder / "key"))
    try:
        yield running.wait_ready()
    finally:
        running.stop()


class Bench:
    """The command as the user of a hub runs it."""

    def __init__(self, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
        self._hub = hub
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str]:
        """The exit code, and what it printed."""
        command, parser = BenchCommand(), argparse.ArgumentParser()
        command.add_arguments(parser)
        self._capsys.readouterr()
        code = command.run(parser.parse_args([*words, "--namespace", self._hub.namespace]))
        return code, self._capsys.readouterr().out

    def figures(self, *words: str) -> tuple[int, dict[str, Any]]:
        """The exit code, and what it prints with --json."""
        code, text = self(*words, "--json")
        found: dict[str, Any] = json.loads(text)
        return code, found


@pytest.fixture
def bench(hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(hub.folder))
    return Bench(hub, capsys)


def test_a_closed_loop_finds_the_hub_of_this_user_and_counts_what_it_answers(
    hub: Hub, bench: Bench, tmp_path: Path
) -> None:
    """What the hub has answered is what the command says; each request stands in the file, and in the picture."""
    before = hub.metric("omni_hub_requests_total")
    files = ["--out", str(tmp_path / "out.json"), "--plot", str(tmp_path / "plot.svg")]
    code, text = bench("--requests", "12", "--concurrency", "2", "--prompt-words", "5", *files)
    assert code == 0, text
    assert f"{hub.url}, echo-one, 2 at a time, 12 requests" in text
    assert "answered   12 of 12" in text
    wait_for("the hub's own count", lambda: hub.metric("omni_hub_requests_total") - before == 12)
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["answered"], written["tokens_per_s"] > 0, len(written["each"])) == (12, True, 12)
    assert {each["tokens"] for each in written["each"]} == {5}
    # Five words, 0.02 s each: no clock is so quick.
    assert written["whole"]["p50_s"] > 0.08
    assert written["first"]["p50_s"] < written["whole"]["p50_s"]
    assert written["between"]["count"] == 12 * 4
    svg = (tmp_path / "plot.svg").read_text()
    # A dot for each first output, and one for each whole answer.
    assert (svg.count("h0"), svg.endswith("</svg>\n")) == (24, True)


@pytest.mark.attack("N6")
async def test_the_key_goes_to_no_address_that_a_record_names(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. somebody writes another address into this hub's record; 2. the command asks the hub itself where it is"""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(hub.folder))
    parser = argparse.ArgumentParser()
    BenchCommand().add_arguments(parser)
    kv = EtcdKV(hub.endpoint)
    try:
        (item,) = (await kv.list(keys.hubs_prefix(hub.namespace))).items
        record = json.loads(item.value)
        forged = json.dumps({**record, "address": "http://127.0.0.1:9"}).encode()
        await kv.put(item.key, forged, item.lease_id)
        try:
            assert local_url(parser.parse_args(["--namespace", hub.namespace])) == hub.url
        finally:
            await kv.put(item.key, item.value, item.lease_id)
    finally:
        await kv.close()


def test_what_warms_up_is_sent_and_counts_nowhere(hub: Hub, bench: Bench, tmp_path: Path) -> None:
    before = hub.metric("omni_hub_requests_total")
    (tmp_path / "prompts").write_text("one\none two\none two three\n")
    words = ["--warm-up", "2", "--requests", "3", "--prompt-file", str(tmp_path / "prompts")]
    code, found = bench.figures(*words, "--out", str(tmp_path / "out.json"))
    assert (code, found["answered"], found["warm_up"], found["first"]["count"]) == (0, 3, 2, 3)
    wait_for("the hub's own count", lambda: hub.metric("omni_hub_requests_total") - before == 5)
    # Its prompts are used up: no cache of prefixes makes the first answers quicker.
    each = json.loads((tmp_path / "out.json").read_text())["each"]
    assert [line["tokens"] for line in each] == [3, 1, 2]


def test_an_open_loop_does_not_slow_down_with_the_hub_and_what_is_refused_stands_apart(bench: Bench) -> None:
    """Forty in a blink, for replicas that run two and a hub that has two wait: some get in, most get a 429."""
    code, found = bench.figures("--rate", "2000", "--requests", "40", "--prompt-words", "20")
    assert code == 0, found
    assert found["answered"] >= 2
    assert found["refused"] >= 10
    assert found["answered"] + found["refused"] == 40
    assert found["failed"] == {}
    # What is refused at once would make the latencies look better.
    assert found["whole"]["count"] == found["answered"]
    assert found["whole"]["p50_s"] > 0.3


def test_prompts_of_a_file_are_sent_in_turn_with_the_fields_that_were_given(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one two three\n\nfour\n")
    file = ["--prompt-file", str(tmp_path / "prompts"), "--out", str(tmp_path / "out.json")]
    code, found = bench.figures("--requests", "4", *file)
    assert (code, found["answered"]) == (0, 4)
    each = [line["tokens"] for line in json.loads((tmp_path / "out.json").read_text())["each"]]
    assert each == [3, 1, 3, 1]
    code, found = bench.figures("--requests", "2", *file, "--max-tokens", "2")
    assert [line["tokens"] for line in json.loads((tmp_path / "out.json").read_text())["each"]] == [2, 1]
    code, text = bench("--requests", "2", "--extra-body", '{"nonsense": 1}')
    assert code == 1
    assert "failed     2 400 invalid_request: " in text
    assert "nonsense" in text


def test_a_hub_that_dies_in_the_middle_ends_the_test_with_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. the hub has answered some
    2. it is killed, and with it what is on its way
    3. it can't be reached for seconds: the test ends, a minute early, with the figures
    """
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(load, "_GONE_S", 1.0)
    running = Hub.of_yaml(tmp_path, DEPLOY)
    try:
        running.wait_ready()

        def kill() -> None:
            with contextlib.suppress(AssertionError):
                wait_for("answers", lambda: running.metric("omni_hub_requests_total") >= 6)
            running.process.kill()

        killing = threading.Thread(target=kill)
        killing.start()
        command, parser = BenchCommand(), argparse.ArgumentParser()
        command.add_arguments(parser)
        words = ["--url", running.url, "--rate", "10", "--duration", "90", "--prompt-words", "5", "--json"]
        code = command.run(parser.parse_args(words))
        killing.join()
    finally:
        running.stop()
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (code, found["hub_gone"]) == (1, True)
    assert found["answered"] >= 5
    assert found["failed"]["not reachable"] > 0
    assert found["seconds"] < 85
    assert "the hub could not be reached any more" in captured.err


def test_ctrl_c_on_a_terminal_gives_what_was_measured_so_far(hub: Hub) -> None:
    """The line changes while it runs; after Ctrl-C the figures stand there, and the exit code is the usual one."""
    master, slave = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in DEFAULTS}
    environment |= {"TERM": "xterm", "VLLM_API_KEY": KEY}
    words = ["--url", hub.url, "--duration", "100", "--prompt-words", "3"]
    child = subprocess.Popen([*BENCH, *words], stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    written = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):
            while piece := os.read(master, 65536):
                written.extend(piece)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    try:
        wait_for("a live line with latencies", lambda: b"whole p50" in written)
        child.send_signal(signal.SIGINT)
        code = child.wait(30)
        reading.join(30)
    finally:
        child.kill()
        child.wait()
        os.close(master)
    text = written.decode()
    assert code == 130, text
    assert "whole answer" in text
    assert "these are the figures so far" in text
    # What changes is drawn over, not left behind: there are two lines of it, of 80 columns at most.
    shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", text)]
    assert max(len(line) for line in shown if "p50" in line or "on their way" in line) <= 80


def test_a_hub_that_asks_for_a_key_gets_the_one_of_the_environment_or_of_a_file(
    hub: Hub, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(HubUnloadableError, match="wants a key: give --api-key-file FILE, or set VLLM_API_KEY"):
        bench("--requests", "2")
    code, text = bench("--requests", "2", "--api-key-file", str(hub.folder / "key"))
    assert code == 0
    assert "answered   2 of 2" in text
    assert KEY not in text


async def measured(address: str, asking: Asking, plan: LoadPlan) -> BenchSummary:
    client = BenchClient(address)
    try:
        await client.served_model()
        return await LoadRun(plan, asking, client, lambda _: "one two three", Random(1).random).run()
    finally:
        await client.close()


async def test_sound_is_measured_in_seconds_of_it_by_chats_and_by_speech() -> None:
    """Three words of 0.1 s each; a chat has their text, too."""
    async with served(SPEAKER) as running:
        chats = await measured(running.address, Asking("speaker", modalities=("text", "audio")), LoadPlan(4, None))
        speech = await measured(running.address, Asking("speaker", is_speech=True), LoadPlan(4, None, concurrency=2))
    assert (chats.answered, speech.answered) == (4, 4), (chats, speech)
    assert set(chats.firsts) == {"text", "audio"}
    assert set(speech.firsts) == {"audio"}
    for summary in (chats, speech):
        assert summary.sound_s_per_s * summary.seconds == pytest.approx(4 * 0.3)


async def test_pictures_are_counted_and_have_a_first_of_their_own() -> None:
    async with served(DRAWER) as running:
        both = await measured(running.address, Asking("drawer"), LoadPlan(3, None))
        words = await measured(running.address, Asking("drawer", modalities=("text",)), LoadPlan(3, None))
    assert set(both.firsts) == {"text", "image"}
    assert both.pictures_per_s * both.seconds == pytest.approx(3)
    assert (set(words.firsts), words.pictures_per_s) == ({"text"}, 0.0)


async def test_what_is_no_hub_is_told_before_anything_is_sent() -> None:
    client = BenchClient("http://127.0.0.1:9")
    with pytest.raises(HubUnloadableError, match=r"does not answer .*: is that its address, does it run"):
        await client.served_model()
    await client.close()


async def test_a_certificate_that_is_not_trusted_is_told_with_the_flag_for_it(tmp_path: Path) -> None:
    """The same server with --ca-file is asked, and its answer is no hub's."""
    made = make_certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.server_cert, made.server_key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        for ca_file, told in (("", "give --ca-file FILE"), (made.ca, "answers 404, and not as a hub does")):
            client = BenchClient(url, ca_file=ca_file)
            with pytest.raises(HubUnloadableError, match=told):
                await client.served_model()
            await client.close()
    finally:
        server.close()
        await server.wait_closed()
