"""The copy-paste blocks of docs/scenarios.md: read from the page, run as they stand there, and asked as it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tests.support.netns import Host
from tests.support.processes import DEFAULTS, Child, wait_for

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "scenarios.md"

_BLOCK: Final = re.compile(r"^```bash ([\w/-]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_blocks() -> dict[str, str]:
    """The page's named blocks: ``bash B/hub`` names one ``B/hub``."""
    found = _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len({name for name, _ in found}) == len(found), "two blocks of one name"
    return {name: text.strip() for name, text in found}


def parts_of(scenario: str) -> dict[str, str]:
    """The commands that make up a scenario, by the part of it that each starts."""
    return {name.partition("/")[2]: text for name, text in read_blocks().items() if name.startswith(f"{scenario}/")}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the page's variables stand for."""

    pair: Path
    host: str
    port: int
    etcd: str = ""

    def variables(self) -> dict[str, str]:
        return {"PAIR": str(self.pair), "ETCD": self.etcd, "HOST": self.host, "PORT": str(self.port)}


class Part(Child):
    """One command of the page as its own process, on a host of its own if one is given."""

    def __init__(self, command: str, folder: Path, settings: Settings, host: Host | None = None) -> None:
        folder.mkdir()
        self.host = host
        self.log = folder / "omni.log"
        environment = {key: value for key, value in os.environ.items() if key not in DEFAULTS}
        environment |= settings.variables()
        environment |= {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder / "state")}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        # Signals are for the command, not for a shell around it.
        shell = ["bash", "-c", f"exec {command}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                host.command(*shell) if host else shell,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )

    def wait_begun(self) -> None:
        """It has done all that it can do without the others."""
        said = ("hub.listening", "pipeline.waiting", "supervisor.starting")

        def begun() -> bool:
            self.must_run()
            return any(each in self.text for each in said)

        wait_for("the first words", begun)


class Client:
    """Asks a hub over HTTP, from a host if one is given. ``settings`` say which hub."""

    def __init__(self, settings: Settings, host: Host | None = None) -> None:
        self._host = host
        self._settings = settings
        self._blocks = read_blocks()

    def ask(self, question: str | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Status and body of the page's own question, or of another one in its words and with more ``fields``."""
        url, body = _parse_curl(self._blocks["ask"], self._settings.variables())
        assert body is not None
        asked = json.loads(body) | fields
        if question is not None:
            asked["messages"][0]["content"] = question
        status, answer = self._exchange(url, asked)
        return status, json.loads(answer)

    def wait_ready(self, counts: Mapping[int, int], timeout_s: float = 60.0) -> None:
        """Wait until so many replicas of each stage can be picked, as the page's own line tells."""
        wait_for(f"replicas {dict(counts)}", lambda: self.pickable() == counts, timeout_s)

    def pickable(self) -> dict[int, int]:
        """How many replicas of each stage can be picked; nothing while no hub answers."""
        url, _ = _parse_curl(self._blocks["ready"], self._settings.variables())
        try:
            _, body = self._exchange(url)
        except OSError:
            return {}
        return {int(stage): entry["pickable"] for stage, entry in json.loads(body)["stages"].items()}

    def status(self, path: str) -> int:
        """The status of one of the hub's pages."""
        return self._exchange(f"http://{self._settings.host}:{self._settings.port}{path}")[0]

    def figure(self, name: str) -> float:
        """One of the hub's metrics, over all its labels."""
        lines = self._exchange(f"http://{self._settings.host}:{self._settings.port}/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))

    def _exchange(self, url: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        parts = urlsplit(url)
        connection = HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        with self._host.inside() if self._host else nullcontext():
            connection.connect()
        try:
            data = None if body is None else json.dumps(body)
            connection.request(
                "GET" if body is None else "POST", parts.path, data, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def _parse_curl(line: str, variables: Mapping[str, str]) -> tuple[str, str | None]:
    """The address and the body of a ``curl``."""
    words = [string.Template(word).safe_substitute(variables) for word in shlex.split(line.replace("\\\n", " "))]
    assert words[0] == "curl"
    (url,) = (word for word in words if word.startswith("http://"))
    return url, words[words.index("-d") + 1] if "-d" in words else None
