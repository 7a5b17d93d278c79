"""What watchers do that are told nothing else."""

from __future__ import annotations

from tests.support.defaults import unusual_defaults


def test_a_watcher_that_is_told_nothing_counts_nothing_and_compares_once_a_minute() -> None:
    found = unusual_defaults("omni_discovery.view")
    assert {name: default for name, default in found.items() if not callable(default)} == {
        "AntiEntropyOptions.echo_timeout_s": 2.0,
        "AntiEntropyOptions.anti_entropy_s": 60.0,
        "ViewOptions.anti_entropy_s": 60.0,
    }
    assert (found["ViewOptions.serves"](), found["ViewOptions.health"]()) == ("", None)
