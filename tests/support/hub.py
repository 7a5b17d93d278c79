"""A whole hub with its local stages, for tests that go through the front door."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from omni_discovery.etcd.embedded_file import EmbeddedEndpoint, read_embedded
from tests.support.netns import Host
from tests.support.processes import Child, wait_for

ECHO_PAIR = """
model: echo-pair
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 8}, runtime: {num_replicas: 2}, final_output: text}
  - {stage_id: 1, engine: echo, engine_args: {modality: image}, runtime: {num_replicas: 2}, final_output: image}
"""


class Hub(Child):
    """``omni serve`` on a free port, with an embedded etcd unless the arguments name endpoints."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        namespace: str = "test",
        variables: Mapping[str, str] | None = None,
        python: Path | None = None,
        pass_fds: Sequence[int] = (),
        module: str = "omni_discovery",
        host: Host | None = None,
        name: str = "serve",
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.namespace = namespace
        words = ["serve", "--port", "0", "--namespace", namespace, *arguments]
        super().__init__(
            words,
            folder,
            name,
            variables=variables,
            python=python,
            pass_fds=pass_fds,
            module=module,
            host=host,
            prefix=prefix,
        )

    @classmethod
    def of_yaml(cls, folder: Path, text: str, *arguments: str, host: Host | None = None) -> Hub:
        """Serve a deploy document."""
        file = folder / "deploy.yaml"
        file.write_text(text)
        return cls(folder, ["--deploy-config", str(file), *arguments], host=host)

    def wait_ready(self, timeout_s: float = 60.0) -> Hub:
        """Wait until every stage has a replica that can be picked."""
        self.url = wait_for("the hub to listen", self._listening, timeout_s)
        wait_for("every stage to be ready", lambda: self.get("/ready")[0] == 200, timeout_s)
        return self

    @property
    def endpoint(self) -> str:
        """The embedded etcd's."""
        found: EmbeddedEndpoint = wait_for(
            "the runtime file", lambda: read_embedded(self.folder / "omni", self.namespace)
        )
        return found.endpoint

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, body: Any, path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
        """Status and JSON body of a POST; ``body`` may be raw bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def ask(self, text: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Status and body of one chat completion."""
        return self.post({"messages": [{"role": "user", "content": text}], **fields})

    def metric(self, name: str) -> float:
        """The value of a metric, summed over the labels that the name leaves open."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def replicas(self, *flags: str) -> list[dict[str, Any]]:
        """The records, as ``omni replicas --json`` prints them."""
        child = Child(["replicas", "--namespace", self.namespace, "--json", *flags], self.folder, "replicas")
        assert child.process.wait(30) == 0, child.text
        return [json.loads(line) for line in child.text.splitlines() if line.startswith("{")]

    def _listening(self) -> str | None:
        self.must_run()
        marker = "hub.listening url="
        return next((line.split(marker)[1].split()[0] for line in self.text.splitlines() if marker in line), None)


@contextmanager
def asking(hub: Hub, count: int, text: str, pause_s: float = 0.0, **fields: Any) -> Iterator[None]:
    """So many clients ask one request after the other meanwhile, whatever the answers."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(pause_s):
            with suppress(OSError, HTTPException):
                hub.ask(text, **fields)

    clients = [threading.Thread(target=ask) for _ in range(count)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join(60)
