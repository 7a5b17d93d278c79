"""Replicas killed one after another under load: clients notice nothing. ``make soak`` is the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.soak import soak

pytestmark = pytest.mark.e2e


def test_clients_see_no_error_while_a_replica_is_killed_each_second(tmp_path: Path) -> None:
    """1. four echo replicas serve a client that asks 60 times a second, half of it for streams
    2. each second one of them gets SIGKILL, unless two are starting; its supervisor starts another
    3. each answer is exactly the prompt: nothing is lost, doubled or cut
    """
    row = soak(tmp_path, seconds=8.0, rate=60.0)

    # Eight, where replicas start within a second.
    assert row["kills"] >= 3
    assert row["session_losses"] >= 3
    assert row["asked"] == 480
    assert row["errors"] == 0, row["examples"]
