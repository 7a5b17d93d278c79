"""What a replica tells its supervisor of its state fits into one line, however many hubs there are."""

from __future__ import annotations

import os

import pytest

from omni_discovery.metrics.samples import ReplicaSample
from stage_runtime import status_pipe
from stage_runtime.status_pipe import Sampled, split_line

#: A hub's id at its longest: 40 characters of its host, and eight of its own.
HUB = "hub-{:0>36}-0123abcd"


def written(sample: ReplicaSample, monkeypatch: pytest.MonkeyPatch) -> ReplicaSample:
    """What the supervisor reads."""
    readable, writable = os.pipe()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(status_pipe, "_STDOUT", writable)
            status_pipe.write_status(Sampled(sample))
        os.set_blocking(readable, False)
        line = os.read(readable, 1 << 16)
    finally:
        os.close(readable)
        os.close(writable)
    # PIPE_BUF: a longer one may be torn apart by what a library prints.
    assert len(line) <= 4096
    assert line.endswith(b"\n")
    _, message = split_line(line.rstrip(b"\n"))
    assert isinstance(message, Sampled)
    return message.sample


def test_a_sample_of_credits_at_very_many_hubs_names_those_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    credits_by_hub = {HUB.format(number): number for number in range(1, 201)}
    sample = ReplicaSample(stage_id=0, replica_id=3, is_up=True, slots=8, credits_by_hub=credits_by_hub)
    found = written(sample, monkeypatch)
    assert (found.replica_id, found.is_up, found.slots) == (3, True, 8)
    most = {HUB.format(number): number for number in range(185, 201)}
    assert found.credits_by_hub == {**most, "(others)": sum(range(1, 185))}


def test_no_other_hubs_are_named_where_none_were_left_out() -> None:
    few = {HUB.format(number): number for number in range(1, 17)}
    assert status_pipe._with_most(few) == few
    assert status_pipe._with_most({}) == {}


def test_a_sample_that_fits_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ReplicaSample(stage_id=0, replica_id=3, credits_by_hub={HUB.format(number): 1 for number in range(17)})
    assert written(few, monkeypatch) == few


def test_a_sample_with_very_many_measures_of_its_engine_goes_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = ReplicaSample(stage_id=0, replica_id=3, engine={f"measure_{number}": 1.5 for number in range(500)})
    assert written(sample, monkeypatch) == ReplicaSample(stage_id=0, replica_id=3)


def test_a_sample_that_is_too_long_whatever_is_left_out_is_an_error_and_not_passed_over() -> None:
    with pytest.raises(ValueError, match="too long for one line of 4096"):
        status_pipe.write_status(Sampled(ReplicaSample(stage_id=0, replica_id=3, about={"model": "x" * 5000})))
