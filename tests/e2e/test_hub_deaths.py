"""A hub is killed or stopped under load, behind HAProxy: OpenAI's client shows its user nothing of that."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.support.binaries import require_haproxy
from tests.support.hub import Hub
from tests.support.processes import Child, wait_for

pytestmark = pytest.mark.e2e

WRAPPER = Path(__file__).resolve().parents[2] / "docs" / "examples" / "client" / "resuming.py"
CLIENTS = 40
ENDS = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
#: The pause before each word: the hub ends before its answers begin, also if it stops, which takes 5 s; or amid them.
SLOW_S, QUICK_S = 8.0, 0.2
DOCUMENT = """
model: echo
stages:
  - stage_id: 0
    engine: echo
    engine_args: {{capacity: 64, random: true, delay_s: {delay_s}}}
    deterministic: true
    final_output: text
"""
#: TCP is all that it looks at. A hub that refuses connections is passed over at once, and by the checks soon.
HAPROXY = """
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
    bind fd@{descriptor}
    balance roundrobin
    default-server check inter 500ms fall 1
{servers}
"""


class Site:
    """Two replicas, two hubs in front of them, and HAProxy in front of these."""

    def __init__(self, folder: Path, endpoint: str, delay_s: float) -> None:
        self.children: list[Child] = []
        self._proxy: subprocess.Popen[bytes] | None = None
        registry = ["--etcd-endpoints", endpoint, "--namespace", "test"]
        headless = ["serve", "--headless", "--stage-id", "0", "--omni-dp-size-local", "2", *registry]
        self.children.append(Child(headless, folder, "stage0"))
        self.hubs: list[Hub] = []
        for name in ("a", "b"):
            (folder / name).mkdir()
            document = DOCUMENT.format(delay_s=delay_s)
            hub = Hub.of_yaml(folder / name, document, "--hub-only", "--etcd-endpoints", endpoint)
            self.hubs.append(hub)
            self.children.append(hub)
        for hub in self.hubs:
            hub.wait_ready()
            wait_for("both replicas", partial(_has_both, hub))
        self.url = self._start_proxy(folder)

    def _start_proxy(self, folder: Path) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        servers = (f"    server {hub.folder.name} {hub.url.removeprefix('http://')}" for hub in self.hubs)
        file = folder / "haproxy.cfg"
        file.write_text(HAPROXY.format(descriptor=listener.fileno(), servers="\n".join(servers)))
        command = [require_haproxy(), "-db", "-f", str(file)]
        with listener, (folder / "haproxy.log").open("wb") as log:
            self._proxy = subprocess.Popen(command, pass_fds=[listener.fileno()], stdout=log, stderr=log)
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")

    def in_flight(self) -> list[float]:
        return [hub.metric("omni_hub_requests_in_flight") for hub in self.hubs]

    def end_first(self, how: signal.Signals) -> None:
        self.hubs[0].process.send_signal(how)

    def stop(self) -> list[int]:
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait(10)
        return [pid for child in reversed(self.children) for pid in child.stop()]


def _has_both(hub: Hub) -> bool:
    return '"pickable":2' in hub.get("/ready")[1]


@pytest.fixture
def start_site(tmp_path: Path) -> Iterator[Callable[[float], Site]]:
    require_haproxy()
    sites: list[Site] = []

    def start(delay_s: float) -> Site:
        sites.append(Site(tmp_path, etcd.endpoint, delay_s))
        return sites[-1]

    with EmbeddedEtcd() as etcd:
        try:
            yield start
        finally:
            left = [pid for site in sites for pid in site.stop()]
        assert left == []


def asked(number: int, words: int) -> dict[str, Any]:
    """What client ``number`` asks: its own words, drawn numbers to which are of its own seed."""
    text = " ".join(f"c{number}w{word}" for word in range(words))
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "seed": number}


def is_answer(text: str, number: int, words: int) -> bool:
    """Whether each word came once, in order, with its drawn number."""
    return [each.partition("~")[0] for each in text.split()] == [f"c{number}w{word}" for word in range(words)]


@ENDS
def test_a_hub_that_dies_before_its_answers_begin_is_no_error(
    start_site: Callable[[float], Site], how: signal.Signals
) -> None:
    """1. 20 whole answers and 20 streams are under way at two hubs, and nothing of them has come
    2. one hub is killed, or told to stop: each client has its right answer, with the client's default retries
    """
    site, words = start_site(SLOW_S), 1

    def ask(number: int) -> str:
        with site.client() as client:
            if number % 2:
                return client.chat.completions.create(**asked(number, words)).choices[0].message.content or ""
            chunks = client.chat.completions.create(**asked(number, words), stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(CLIENTS) as threads:
        answers = threads.map(ask, range(CLIENTS))
        wait_for("all to be under way", lambda: sum(site.in_flight()) == CLIENTS)
        lost, _ = site.in_flight()
        site.end_first(how)
        texts = list(answers)
    assert lost >= CLIENTS // 4
    assert [number for number, text in enumerate(texts) if not is_answer(text, number, words)] == []
    if how is signal.SIGKILL:
        assert site.hubs[1].metric('omni_hub_requests_total{outcome="ok"}') == CLIENTS


@ENDS
def test_streams_that_had_begun_go_on_for_the_documented_wrapper(
    start_site: Callable[[float], Site], how: signal.Signals
) -> None:
    """1. 40 streams are under way at two hubs, and each client has words of its answer
    2. one hub is killed, or told to stop, which leaves its answers 5 s
    3. each client has each word once, and the drawn numbers are those of an answer that nobody disturbed
    """
    site, words, begun = start_site(QUICK_S), 60, threading.Semaphore(0)

    def ask(number: int) -> str:
        texts = []
        with site.client() as client:
            for chunk in wrapper().chat(client, **asked(number, words)):
                texts.append(chunk.choices[0].delta.content or "")
                if len(texts) == 3:
                    begun.release()
        return "".join(texts)

    with ThreadPoolExecutor(CLIENTS) as threads:
        answers = threads.map(ask, range(CLIENTS))
        for _ in range(CLIENTS):
            assert begun.acquire(timeout=60)
        lost, _ = site.in_flight()
        site.end_first(how)
        texts = list(answers)
        assert lost >= CLIENTS // 4
        assert [number for number, text in enumerate(texts) if not is_answer(text, number, words)] == []
        resumed = site.hubs[1].metric("omni_hub_requests_resumed_total")
        assert resumed >= lost
        with site.client() as client:
            again = threads.map(lambda number: client.chat.completions.create(**asked(number, words)), range(CLIENTS))
            assert [each.choices[0].message.content for each in again] == [text.rstrip() for text in texts]


def wrapper() -> Any:
    """The example of the documentation."""
    spec = importlib.util.spec_from_file_location("resuming", WRAPPER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
