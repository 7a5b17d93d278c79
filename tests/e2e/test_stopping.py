"""A hub that is told to stop while an answer is open goes soon, and in order."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.hub import Hub
from tests.support.processes import wait_for
from tests.support.quiet import soon_s

SLOW = """
model: echo
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 4, delay_s: 0.1}, final_output: text}
"""


def test_ctrl_c_with_an_open_stream_waits_for_no_lease(tmp_path: Path) -> None:
    """1. a hub with a local replica streams an answer that takes minutes; SIGINT
    2. after the grace for open answers the stream ends with an error; the replica drains, and this hub, which still
       stands, acknowledges it: nobody waits until a lease has run out
    """
    hub = Hub.of_yaml(tmp_path, SLOW).wait_ready()
    try:
        where = urlsplit(hub.url)
        assert where.hostname is not None
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
        body = {"messages": [{"role": "user", "content": "word " * 2000}], "stream": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        stream = connection.getresponse()
        assert stream.readline().startswith(b"data: ")
        began_s = time.monotonic()
        hub.process.send_signal(signal.SIGINT)
        rest = stream.read().decode()
        assert hub.process.wait(60) == 0, hub.text
        took_s = time.monotonic() - began_s
        connection.close()
    finally:
        left = hub.stop()
    assert not left
    assert "the hub is stopping" in rest
    assert "replica.drain_unacknowledged" not in hub.text
    assert hub.text.index("supervisor.draining") < hub.text.index("hub.closed")
    assert took_s < soon_s(12.0)


def test_a_supervisor_that_is_killed_is_started_again_by_its_hub(tmp_path: Path) -> None:
    """1. the only supervisor gets SIGKILL, and its replica goes with it
    2. the hub says so, goes on, and starts it again: the stage can take work again, and nothing is left at the end
    """
    hub = Hub.of_yaml(tmp_path, SLOW).wait_ready()
    try:
        (supervisor, *_) = [pid for pid in hub.tree() if b"--parent-pid" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(supervisor, signal.SIGKILL)
        wait_for("the second life", lambda: hub.text.count("replica.ready stage=0") == 2)
        wait_for("the stage to be ready", lambda: hub.get("/ready")[0] == 200)
        assert hub.ask("one two")[0] == 200
    finally:
        left = hub.stop()
    assert not left
    assert "stage.ended stage=0 exit_code=-9 next_try_s=0.5" in hub.text
