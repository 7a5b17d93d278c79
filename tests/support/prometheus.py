"""A real Prometheus on loopback: what it scrapes is given to it, and what it knows is asked over its API."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from omni_discovery.etcd import _die_with_parent
from tests.support.binaries import require_prometheus
from tests.support.processes import wait_for
from tests.support.registry import quiet_port


@dataclass(frozen=True)
class Target:
    """One place that Prometheus scrapes; ``instance`` is what it calls it."""

    job: str
    instance: str
    port: int


class Prometheus:
    """Scrapes its targets each second, and evaluates the rules as often. Start it in the main thread.

    The kernel ends it when the thread that started it does.
    """

    def __init__(self, folder: Path, rules: str, targets: Iterable[Target]) -> None:
        self._folder = folder
        self._port = quiet_port()
        (folder / "rules.yaml").write_text(rules)
        jobs: dict[str, list[Any]] = {}
        for each in targets:
            group = {"targets": [f"127.0.0.1:{each.port}"], "labels": {"instance": each.instance}}
            jobs.setdefault(each.job, []).append(group)
        settings = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
                "external_labels": {"omni_docs": "https://git.example/"},
            },
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": job, "static_configs": groups} for job, groups in jobs.items()],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [
            str(require_prometheus()),
            f"--config.file={self._folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--log.level=warn",
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            launcher = [sys.executable, "-I", "-S", _die_with_parent.__file__]
            self._process = subprocess.Popen(launcher, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self._process.stdin is not None
        with self._process.stdin as orders:
            orders.write(json.dumps({"parent_pid": os.getpid(), "command": command}).encode())
        wait_for("Prometheus", self._answers)

    def stop(self) -> None:
        """Stop it; what it knew is in its folder."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            self._process = None

    def alerts(self) -> list[Any]:
        """The alerts that fire now: their labels and annotations."""
        return [each for each in self._get("alerts")["alerts"] if each["state"] == "firing"]

    def query(self, expression: str) -> list[Any]:
        """What an expression is now: a list of labels (``metric``) and values."""
        return list(self._get("query", query=expression)["result"])

    def query_range(self, expression: str, since_s: float, until_s: float, step_s: float = 5.0) -> list[Any]:
        """The series of an expression in a span of time that have a number anywhere, as Grafana would draw them."""
        span = {"start": f"{since_s}", "end": f"{until_s}", "step": f"{step_s}"}
        found = self._get("query_range", query=expression, **span)["result"]
        return [each for each in found if any(not math.isnan(float(value)) for _, value in each["values"])]

    def label_values(self, metric: str, label: str) -> Sequence[str]:
        """Which values a metric's label has."""
        return list(self._get(f"label/{label}/values", **{"match[]": metric}))

    def _answers(self) -> bool:
        assert self._process is not None
        log = self._folder / "prometheus.log"
        assert self._process.poll() is None, log.read_text(errors="replace")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _get(self, path: str, **fields: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]
