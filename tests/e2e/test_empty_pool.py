"""A hub that nobody serves yet, or any more, is a hub all the same."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.support.hub import ECHO_PAIR, Hub
from tests.support.processes import wait_for

pytestmark = pytest.mark.e2e


def test_the_model_is_listed_though_nobody_serves_it(tmp_path: Path) -> None:
    """1. a hub without a single replica: it lives, it is not ready and says which stages are missing
    2. its model is listed; a question is answered by 503 with the time to come back, and names the stage
    """
    with EmbeddedEtcd() as etcd:
        hub = Hub.of_yaml(tmp_path, ECHO_PAIR, "--hub-only", "--pick-timeout", "2", "--etcd-endpoints", etcd.endpoint)
        try:
            hub.url = wait_for("the hub to listen", hub._listening)
            assert hub.get("/health")[0] == 200
            status, text = hub.get("/ready")
            assert status == 503
            assert "stage 0 (none is registered), stage 1 (none is registered)" in text
            status, text = hub.get("/v1/models")
            assert status == 200
            assert [model["id"] for model in json.loads(text)["data"]] == ["echo-pair"]
            with pytest.raises(urllib.error.HTTPError) as refused:
                _ask(hub.url)
            with refused.value as error:
                assert error.code == 503
                assert int(error.headers["Retry-After"]) >= 1
                assert "stage 0" in json.load(error)["error"]["message"]
        finally:
            assert hub.stop() == []


def _ask(url: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "anyone?"}]}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30)
