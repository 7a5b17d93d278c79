"""How replicas are restarted where nothing else is said."""

from __future__ import annotations

from tests.support.defaults import unusual_defaults


def test_the_first_restart_comes_after_half_a_second_and_the_sixth_quick_end_is_a_loop() -> None:
    assert unusual_defaults("stage_runtime.supervisor", "ray_actor", "ray_launcher") == {
        "RestartPolicy.first_delay_s": 0.5,
        "RestartPolicy.most_delay_s": 30.0,
        "RestartPolicy.stable_s": 60.0,
        "RestartPolicy.loop_after": 6,
    }
