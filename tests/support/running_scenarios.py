"""Scenarios of docs/scenarios.md as they run: on one machine, or with a host for each part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.host_etcd import REGISTRY_PORT, etcd_on, etcdctl_on
from tests.support.netns import Host, Network
from tests.support.registry import EtcdServer, quiet_port
from tests.support.scenarios import ROOT, Client, Part, Settings, parts_of

ECHO = ROOT / "compose" / "pair-echo.yaml"
DEMO = ROOT / "compose" / "pair.yaml"
#: Replicas of each stage.
COUNTS: Mapping[str, Mapping[int, int]] = {"A": {0: 1, 1: 1}, "B": {0: 2, 1: 2}, "C": {0: 3, 1: 1}}
#: The parts of each scenario, in the page's order.
PARTS = {"A": ("hub",), "B": ("hub", "painters"), "C": ("hub", "thinkers", "painters")}


class Running:
    """A scenario of the page in the given order of its parts, each begun before the next is started."""

    def __init__(self, scenario: str, order: Sequence[str], folder: Path, settings: Settings) -> None:
        self.scenario = scenario
        self.settings = settings
        self._order = order
        self._folder = folder
        self.parts: dict[str, Part] = {}

    def start(self, hosts: Mapping[str, Host] | None = None) -> None:
        commands = parts_of(self.scenario)
        assert set(commands) == set(self._order)
        for name in self._order:
            host = hosts[name] if hosts else None
            self.parts[name] = Part(commands[name], self._folder / name, self.settings, host)
            self.parts[name].wait_begun()

    def stop(self) -> None:
        """Stop all at once by SIGTERM: code 0, and nothing left."""
        with ThreadPoolExecutor(len(self.parts)) as pool:
            left = list(pool.map(Part.stop, self.parts.values()))
        assert left == [[]] * len(self.parts)
        for part in self.parts.values():
            assert part.process.returncode == 0, part.text
            assert "Traceback" not in part.text, part.text


@contextmanager
def on_one_machine(folder: Path, scenario: str, pair: Path) -> Iterator[tuple[Running, Client]]:
    """A scenario in the page's order, with an etcd of its own where the page wants one."""
    etcd = EtcdServer(folder)
    running = Running(scenario, PARTS[scenario], folder, Settings(pair, "127.0.0.1", quiet_port(), etcd.endpoint))
    try:
        if scenario != "A":
            etcd.start()
        running.start()
        yield running, Client(running.settings)
    finally:
        for part in running.parts.values():
            part.stop()
        etcd.kill()


@contextmanager
def on_hosts(
    folder: Path, scenario: str, order: Sequence[str], pair: Path
) -> Iterator[tuple[Running, Client, Network]]:
    """A scenario with each part on a host of its own, a registry on one more, and a client on that."""
    folder.mkdir(exist_ok=True)
    with Network("registry", *order) as network, ExitStack() as stack:
        registry = network.hosts["registry"]
        stack.enter_context(etcd_on(registry, folder))
        settings = Settings(pair, network.hosts["hub"].address, 8000, f"{registry.address}:{REGISTRY_PORT}")
        running = Running(scenario, order, folder, settings)
        stack.callback(lambda: [part.stop() for part in running.parts.values()])
        running.start(network.hosts)
        yield running, Client(settings, registry), network
    assert network.left == []


def assert_reached_by_its_own_address(running: Running, network: Network) -> None:
    """Every record says the address of its host's interface, which nobody has told it."""
    printed = etcdctl_on(
        network.hosts["registry"], "get", "--prefix", "--print-value-only", "/omni/v1/default/replicas/"
    )
    records = [json.loads(line) for line in (printed or "").splitlines()]
    assert len(records) == sum(COUNTS[running.scenario].values())
    for record in records:
        addresses = {record[field].removeprefix("tcp://").split(":")[0] for field in ("input_addr", "output_addr")}
        assert addresses == {network.hosts[record["host"]].address}, record


def assert_answered(answer: tuple[int, dict[str, Any]]) -> None:
    """The echo pair's answer to the page's question, with its picture."""
    assert said(answer) == "26 plus 48"
    picture = answer[1]["choices"][1]["message"]["content"]
    assert picture[0]["image_url"]["url"].startswith("data:image/png;base64,")


def said(answer: tuple[int, dict[str, Any]]) -> str:
    status, body = answer
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])
