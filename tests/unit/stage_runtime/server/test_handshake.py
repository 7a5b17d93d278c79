"""The replica's side of hubs that it can't talk to."""

from __future__ import annotations

import pytest

from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.records.schema import HubRecord
from stage_runtime.server.handshake import SecurityMismatchLog, former_hubs


@pytest.mark.attack("Q41")
def test_each_hub_without_encryption_is_warned_of_once_and_of_very_many_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = SecurityMismatchLog("k" * 40)
    few = {f"h{number}": HubRecord(hub_id=f"h{number}") for number in range(3)}
    for _ in range(2):
        log.warn_of_hubs(few)
    assert len(caplog.records) == 3
    for turn in range(5):
        log.warn_of_hubs({f"x{number}": HubRecord(hub_id=f"x{number}") for number in range(turn * 500, 2000)})
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == 65
    assert lines[63].startswith("hub.unusable hub=x60: ")
    assert lines[64] == "hub.unusable_more: others like these are not named; omni doctor says more"


@pytest.mark.attack("Z88")
def test_only_a_hub_that_may_connect_opens_the_port_to_long_frames() -> None:
    """A record without a key, with half of one or of a hub that was revoked did, for the replica's whole life."""
    key = KeyPair.generate().public
    hubs = {
        "keyless": HubRecord(hub_id="keyless"),
        "half": HubRecord(hub_id="half", curve_public_key=key[:20]),
        "revoked": HubRecord(hub_id="revoked", curve_public_key=key),
        "new": HubRecord(hub_id="new", curve_public_key=key, wire_version=wire.VERSION_CUT),
        "former": HubRecord(hub_id="former", curve_public_key=key),
    }
    assert former_hubs(key, hubs, frozenset({"revoked"})) == ["former"]
    assert former_hubs("", hubs, frozenset()) == ["keyless"]
