"""Several API servers behind one port: ``omni serve --api-server-count 2``."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from omni_discovery.commands.bench.command import BenchCommand, local_url
from tests.support.hub import Hub
from tests.support.processes import Child, wait_for

ECHO = """
model: {name}
stages:
  - stage_id: 0
    engine: echo
    engine_args: {{capacity: 32, delay_s: {delay_s}}}
    runtime: {{num_replicas: 2}}
    final_output: text
"""


@contextmanager
def two_servers(folder: Path, *flags: str, delay_s: float = 0.0) -> Iterator[Hub]:
    """A hub of two servers that both take clients; nothing of it is left at the end."""
    hub = Hub.of_yaml(folder, ECHO.format(name="echo", delay_s=delay_s), "--api-server-count", "2", *flags)
    try:
        wait_for("both servers", lambda: "api_server.ready" in hub.text and "hub.ready" in hub.text, 90.0)
        yield hub.wait_ready()
    finally:
        left = hub.stop()
    assert not left


def pid_of_further(hub: Hub) -> int:
    """The process of server 1 that listened last."""
    return int(re.findall(r"api_server\.ready number=1 pid=(\d+)", hub.text)[-1])


def wait_listened(hub: Hub, times: int) -> None:
    """Wait until server 1 has listened so many times."""
    wait_for("it to come back", lambda: hub.text.count("api_server.ready number=1") == times, 60.0)


def served(hub: Hub) -> dict[str, float]:
    """Requests that ended well, by server, as one scrape has it."""
    found = re.findall(r'^omni_hub_requests_total\{outcome="ok",server="(\d)"\} (\S+)$', hub.get("/metrics")[1], re.M)
    return {server: float(count) for server, count in found}


class Clients:
    """Clients that ask with a new connection each time, until they are stopped."""

    def __init__(self, hub: Hub, count: int) -> None:
        self._hub = hub
        self._stop = threading.Event()
        self.answers: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                status, body = self._hub.ask("one two three")
                text = body["choices"][0]["message"]["content"] if status == 200 else status
                self.answers[str(text)] += 1
            except (OSError, http.client.HTTPException) as error:
                self.answers[type(error).__name__] += 1

    def stop(self) -> Counter[str]:
        """What they got."""
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
        return self.answers


def test_both_answer_are_hubs_of_their_own_and_show_the_metrics_of_both(tmp_path: Path) -> None:
    """1. forty connections: each server answers some, all right; any scrape has the counts of both, and adds up
    2. etcd has two hubs at one address, and `omni bench` finds that one
    """
    with two_servers(tmp_path) as hub:
        answers = [hub.ask(f"number {number}") for number in range(40)]
        assert [status for status, _ in answers] == [200] * 40
        assert all(f"number {number}" in str(body) for number, (_, body) in enumerate(answers))
        scrapes = [served(hub) for _ in range(12)]
        assert scrapes == [scrapes[0]] * 12, "whichever is asked"
        assert sum(scrapes[0].values()) == 40
        assert set(scrapes[0]) == {"0", "1"}
        # They report once a second. No label of a server: each is shown once.
        shows = re.compile(r'^omni_replica_up\{replica="0/\d",stage="0"\} 1', re.M)
        wait_for("both replicas in a scrape", lambda: len(shows.findall(hub.get("/metrics")[1])) == 2)
        shown = Child(["hubs", "--namespace", "test", "--json"], tmp_path, "hubs")
        assert shown.process.wait(60) == 0, shown.text
        lines = [json.loads(line) for line in shown.text.splitlines() if line.startswith("{")]
        assert len({line["hub_id"] for line in lines}) == 2
        assert {line["address"] for line in lines} == {hub.url}
        assert {line["pid"] for line in lines} == {hub.process.pid, pid_of_further(hub)}
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("XDG_RUNTIME_DIR", str(tmp_path))
            parser = argparse.ArgumentParser()
            BenchCommand().add_arguments(parser)
            assert local_url(parser.parse_args(["--namespace", "test"])) == hub.url


def test_one_that_is_killed_comes_back_with_the_pipeline_of_now(tmp_path: Path) -> None:
    """1. the pipeline is replaced; then one of two servers is killed under load
    2. what it had is cut, all else is answered by the other; 3. it comes back, with what the first server serves
    """
    with two_servers(tmp_path, "--admin-port", "0") as hub:
        clients = Clients(hub, 4)
        time.sleep(1.0)
        (tmp_path / "next.yaml").write_text(ECHO.format(name="echo-2", delay_s=0.0))
        words = ["pipeline", "apply", str(tmp_path / "next.yaml"), "--namespace", "test"]
        applied = Child(words, tmp_path, "apply")
        assert applied.process.wait(60) == 0, applied.text
        os.kill(pid_of_further(hub), signal.SIGKILL)
        wait_listened(hub, 2)
        before = served(hub)
        wait_for("both to answer again", lambda: served(hub).get("1", 0) > 5 and served(hub)["0"] > before["0"])
        answers = clients.stop()
    assert "api_server.ended number=1 exit_code=-9 next_try_s=0.5" in hub.text
    assert hub.text.count("api_server.ended") == 1
    right = answers.pop("one two three")
    assert right > 50
    assert set(answers) <= {"RemoteDisconnected", "ConnectionResetError", "URLError"}
    assert sum(answers.values()) <= 8, "two for each client: one that it had, one that the kernel had for it"


def test_the_key_is_asked_for_by_all_servers_also_when_its_file_is_gone(tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("alice:a-key-of-alice\n")
    keys.chmod(0o600)
    with two_servers(tmp_path, "--api-key-file", str(keys)) as hub:
        keys.unlink()
        os.kill(pid_of_further(hub), signal.SIGKILL)
        wait_listened(hub, 2)
        assert {hub.ask("who")[0] for _ in range(20)} == {401}
        text = hub.get("/metrics")[1]
        assert "a-key-of-alice" not in Path(f"/proc/{pid_of_further(hub)}/cmdline").read_text()
        assert b"a-key-of-alice" not in Path(f"/proc/{pid_of_further(hub)}/environ").read_bytes()
    assert set(re.findall(r'^omni_hub_requests_in_flight\{server="(\d)"\}', text, re.M)) == {"0", "1"}


def test_nobody_notices_that_one_is_stopped_and_started_again(tmp_path: Path) -> None:
    """1. clients ask, each time over a new connection; 2. an operator sends SIGTERM to one server, twice
    3. it answers what it has and what the kernel has connected for it, and goes; all are answered
    """
    with two_servers(tmp_path, delay_s=0.02) as hub:
        clients = Clients(hub, 8)
        for times in (2, 3):
            time.sleep(1.0)
            os.kill(pid_of_further(hub), signal.SIGTERM)
            wait_listened(hub, times)
        answers = clients.stop()
    assert set(answers) == {"one two three"}, answers
    assert hub.text.count("api_server.ended number=1 exit_code=0 next_try_s=0.5") == 2


def test_they_stop_one_after_the_other_and_the_rest_takes_clients_meanwhile(tmp_path: Path) -> None:
    """1. each server has open streams; SIGTERM: the further one waits for its answers, and new clients are answered
    2. then the first stops; all streams end with an error that says so; all processes are gone
    """
    with two_servers(tmp_path, delay_s=0.1) as hub, ExitStack() as opened:
        where = urlsplit(hub.url)
        streams = []
        while not served_in_flight(hub) >= {"0", "1"}:
            connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
            body = {"messages": [{"role": "user", "content": "word " * 500}], "stream": True}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            opened.callback(connection.close)
            streams.append(opened.enter_context(connection.getresponse()))
            assert streams[-1].readline().startswith(b"data: ")
        hub.process.send_signal(signal.SIGTERM)
        wait_for("the stop", lambda: "[api server 1]" in hub.text.partition("hub.stopping")[2])
        time.sleep(0.5)
        assert [hub.ask("still there")[0] for _ in range(5)] == [200] * 5
        assert "api_server.stopped" not in hub.text, "and the one that stops was waiting for its answers"
        rests = [stream.read().decode() for stream in streams]
        assert hub.process.wait(60) == 0, hub.text
    assert all("the hub is stopping" in rest for rest in rests)
    ends = re.findall(r"(api_server\.stopped number=1 exit_code=0|hub\.closed)", hub.text)
    assert ends == ["hub.closed", "api_server.stopped number=1 exit_code=0", "hub.closed"]


def served_in_flight(hub: Hub) -> set[str]:
    """The servers that have a request now."""
    return set(re.findall(r'^omni_hub_requests_in_flight\{server="(\d)"\} [1-9]', hub.get("/metrics")[1], re.M))


def test_further_servers_go_with_the_first_however_it_ends(tmp_path: Path) -> None:
    with two_servers(tmp_path) as hub:
        further = pid_of_further(hub)
        hub.process.kill()
        hub.process.wait()
        wait_for("it to go", lambda: not Path(f"/proc/{further}/cmdline").exists(), 60.0)


def test_a_port_that_another_hub_shares_with_its_own_servers_is_taken(tmp_path: Path) -> None:
    """The kernel would let any process of this user in, and clients of one hub would reach the other."""
    with two_servers(tmp_path) as hub:
        (other := tmp_path / "other").mkdir()
        words = ["serve", "--deploy-config", str(tmp_path / "deploy.yaml"), "--api-server-count", "2"]
        port = str(urlsplit(hub.url).port)
        child = Child([*words, "--namespace", "other", "--port", port], other, "second")
        assert child.process.wait(60) == 2
        assert f"can't listen on 127.0.0.1 port {port}: Address already in use; choose another --port" in child.text
