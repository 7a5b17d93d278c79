"""The output for replicas that are busy, full, or take nothing new."""

from __future__ import annotations

import argparse
from dataclasses import replace

from free_command import FreeCommand, free_slots

from omni_discovery import ReplicaStatus
from omni_discovery.testing import some_replicas


def test_free_slots_are_counted_by_stage() -> None:
    busy, full, draining, other = some_replicas(1, 9, 0, 0, capacity=4)
    draining = replace(draining, status=ReplicaStatus.DRAINING)
    assert free_slots([busy, full, draining, replace(other, stage_id=1)]) == {0: 3, 1: 4}


def test_the_flags_are_those_of_all_commands() -> None:
    parser = argparse.ArgumentParser()
    FreeCommand().add_arguments(parser)
    assert parser.parse_args(["--namespace", "n"]).namespace == "n"
