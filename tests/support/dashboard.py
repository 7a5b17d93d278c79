"""A hub with a dashboard, for the tests in a browser and for the pictures in the docs: text, pictures and sound."""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx

from stage_runtime.demo.killing import ReplicaKiller
from stage_runtime.demo.processes import descendants
from tests.support.hub import Hub
from tests.support.humming import RATE_HZ
from tests.support.processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
#: Where Debian's package has its browser.
CHROMIUM = Path("/usr/bin/chromium")
TOKEN = "operators-token-4d1c"
DOCUMENT = f"""
model: echo-trio
stages:
  - stage_id: 0
    engine: echo
    engine_args: {{capacity: 8, delay_s: 0.05, fail_on: kaputt}}
    runtime: {{num_replicas: 2}}
    final_output: text
  - stage_id: 1
    engine: echo
    engine_args: {{modality: image}}
    runtime: {{num_replicas: 2}}
    input_from: [0]
    final_output: image
  - stage_id: 2
    engine: torch
    engine_args: {{target: "tests.support.humming:hum", sample_rate_hz: {RATE_HZ}, capacity: 4}}
    input_from: [0]
    final_output: audio
"""


class DashboardHub:
    """``omni serve`` with an admin port; ``url`` is that of the dashboard. ``kills``: as a demo starts it."""

    def __init__(
        self, folder: Path, *flags: str, document: str = DOCUMENT, token: str = TOKEN, kills: bool = False
    ) -> None:
        (folder / "deploy.yaml").write_text(document)
        words = ["--deploy-config", str(folder / "deploy.yaml"), "--admin-port", "0", *flags]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.token = token
        self._killer = ReplicaKiller(self._children, lambda _pid: None) if kills else None
        passed: list[int] = []
        if self._killer is not None:
            passed.append(self._killer.hub_end.fileno())
            words += ["--demo-fd", str(passed[0])]
        variables = {"OMNI_ADMIN_TOKEN": token, "PYTHONPATH": path}
        self.hub = Hub(folder, words, variables=variables, pass_fds=passed)

    def wait_ready(self, timeout_s: float = 120.0) -> DashboardHub:
        """Wait until every stage can serve."""
        self.hub.wait_ready(timeout_s)
        found = wait_for("the dashboard", lambda: re.search(r"hub\.dashboard url=(\S+)", self.hub.text))
        self.url = found[1]
        return self

    @property
    def link(self) -> str:
        """The page with the token behind '#', as the demo prints it."""
        return f"{self.url}#token={self.token}"

    def client(self, token: str | None = None) -> httpx.Client:
        """A client of the admin port, with the token unless it is another."""
        token = self.token if token is None else token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30)

    def stop(self) -> list[int]:
        """Stop it; return what is left of its processes."""
        left = self.hub.stop()
        if self._killer is not None:
            self._killer.close()
        return left

    def _children(self) -> list[int]:
        return descendants(self.hub.process.pid)[1:]
