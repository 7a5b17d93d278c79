"""What a lease is told that is told nothing else."""

from __future__ import annotations

from tests.support.defaults import unusual_defaults


def test_nothing_keeps_a_lease_from_being_renewed_that_is_not_said() -> None:
    found = unusual_defaults("omni_discovery.registration")
    assert {name: default for name, default in found.items() if not callable(default)} == {"Tick.may_renew": True}
