"""What an engine's exception is called, and what a replica tells its supervisor of it."""

from __future__ import annotations

import os

import pytest

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from stage_runtime import status_pipe
from stage_runtime.config import EngineDeadError
from stage_runtime.engines.errors import lacks_memory
from stage_runtime.replica.failures import describe_failure, is_known, not_loaded
from stage_runtime.status_pipe import Exiting, Loading, Registered, Up, split_line


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


class SafetensorError(Exception):
    """As safetensors names it."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("HIP out of memory"),
        ValueError("Free memory on device cuda:0 (1/79 GiB) on startup is less than desired GPU memory utilization"),
        ValueError("Available memory on node 0 (3/24 GiB) on startup is less than desired CPU memory utilization"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_too_little_memory_is_called_that_with_what_to_do(error: Exception) -> None:
    assert lacks_memory(error)
    text = describe_failure(error)
    assert text.startswith(f"too little memory: {type(error).__name__}")
    assert "devices" in text
    assert "max_num_seqs" in text


def test_other_errors_are_not() -> None:
    """Nor what vLLM says of engine_args that no free memory could satisfy."""
    error = ValueError("To serve at least one request with the model's max seq len (9), (2 GiB KV cache is needed")
    assert not lacks_memory(error)
    assert describe_failure(error) == f"ValueError: {error}"
    assert describe_failure(KeyError()) == "KeyError"


def test_what_is_told_is_one_line_of_a_bounded_length() -> None:
    text = describe_failure(RuntimeError("a\n  b\n" + "c" * 10_000))
    assert text.startswith("RuntimeError: a b c")
    assert len(text) < 500


def test_a_file_that_is_cut_short_is_a_broken_model() -> None:
    stage = StageConfig(stage_id=2, engine="vllm", model="/models/m")
    broken = not_loaded(stage, SafetensorError("Error while deserializing header: incomplete metadata"))
    assert isinstance(broken, ConfigError)
    assert str(broken).startswith("stage 2: the model /models/m has a file that can't be read; fetch it anew")
    assert is_known(SafetensorError())
    other = not_loaded(stage, RuntimeError("no such layer"))
    assert isinstance(other, EngineDeadError)
    assert not is_known(RuntimeError())


def test_a_model_without_safetensors_is_told_with_the_flag_for_others() -> None:
    stage = StageConfig(stage_id=3, engine="vllm", model="/models/m")
    made = not_loaded(stage, RuntimeError("Cannot find any model weights with `/models/m`"))
    assert isinstance(made, ConfigError)
    assert "stage 3: engine_args.load_format" in str(made)
    assert "--allow pickled-weights" in str(made)


def test_the_supervisor_reads_what_it_is_told_among_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a line that somebody left unfinished; long ones are cut, not torn."""
    reading, writing = os.pipe()
    monkeypatch.setattr(status_pipe, "_STDOUT", writing)
    os.write(writing, b"plain\nunfinished")
    status_pipe.write_status(Up())
    status_pipe.write_status(Exiting("it is\nover"))
    status_pipe.write_status(Exiting("x" * 10_000))
    status_pipe.write_status(Registered("0/12"))
    status_pipe.write_status(Loading("loading\nthe model"))
    os.close(writing)
    with os.fdopen(reading, "rb") as lines:
        found = [split_line(line.rstrip(b"\n")) for line in lines]
    assert found[:3] == [(b"plain", None), (b"unfinished", Up()), (b"", Exiting("it is over"))]
    assert isinstance(found[3][1], Exiting)
    assert found[4:] == [(b"", Registered("0/12")), (b"", Loading("loading the model"))]
    assert 300 < len(found[3][1].reason) < 512
    assert split_line(b"\x00omni something else") == (b"", None)
    assert split_line(b"\x00omni name ../x") == (b"", None)


def test_a_supervisor_that_is_gone_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(status_pipe, "_STDOUT", writing)
    status_pipe.write_status(Up())
    os.close(writing)
