"""Connections that break while a hub is far behind with them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.attack("N1")
def test_a_connection_that_breaks_with_a_full_queue_does_not_end_the_hub() -> None:
    """1. a replica sends far more than its hub reads, then its process is killed
    2. the hub reads nothing for several heartbeats, and lives: libzmq would have ended its process
    """
    hub = subprocess.run(
        [sys.executable, "-m", "tests.support.full_queue"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (hub.returncode, hub.stdout) == (0, "alive\n"), hub.stderr[-2000:]


def test_a_hub_that_was_stopped_while_replicas_talked_to_it_goes_on() -> None:
    """1. a hub is stopped for longer than replicas take between heartbeats; what they say fills its queue
    2. the replica is gone when it goes on: it reads what there is, and lives
    """
    hub = subprocess.run(
        [sys.executable, "-m", "tests.support.stopped_hub"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (hub.returncode, hub.stdout[:12]) == (0, "alive, read "), hub.stderr[-2000:]
    # As many as the queue takes, and not all: else it was never full.
    assert 16 <= int(hub.stdout.split()[-1]) < 40
