"""The thread that samples a replica, and the memory of its GPUs."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest

from omni_discovery.metrics.samples import GpuMemory, ReplicaSample
from stage_runtime.replica.sampler import Sampler, gpu_memory, library_versions
from stage_runtime.status_pipe import Sampled, StatusMessage

SAMPLE = ReplicaSample(stage_id=0, replica_id=1)


def test_a_sample_that_fails_is_logged_once_and_the_next_is_written(caplog: pytest.LogCaptureFixture) -> None:
    """1. no id yet: nothing is written; 2. twice an error: one line; 3. a sample"""
    answers: list[Any] = [None, RuntimeError("first"), RuntimeError("second"), SAMPLE]
    written: list[StatusMessage] = []
    done = threading.Event()

    def take() -> ReplicaSample | None:
        answer = answers.pop(0) if answers else SAMPLE
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    def write(message: StatusMessage) -> None:
        written.append(message)
        done.set()

    sampler = Sampler(take, write, interval_s=0.01)
    sampler.start()
    assert done.wait(30)
    sampler.stop()
    sampler.stop()
    assert written[0] == Sampled(SAMPLE)
    assert [message.partition(":")[0] for message in caplog.messages] == ["replica.not_sampled"]


class FakeCuda:
    """Four GPUs, of which this process has memory on the second; none of the others may be asked."""

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 4

    def memory_reserved(self, index: int) -> int:
        return 512 if index == 1 else 0

    def mem_get_info(self, index: int) -> tuple[int, int]:
        assert index == 1
        return 30, 80


def test_the_gpus_that_the_replica_uses_are_measured_and_no_other_is_touched() -> None:
    torch = types.SimpleNamespace(cuda=FakeCuda())
    assert gpu_memory({"torch": torch}) == (GpuMemory(1, 50, 80),)


def test_without_a_gpu_or_without_torch_there_is_nothing_and_torch_is_not_imported() -> None:
    idle = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: False))
    assert gpu_memory({"torch": idle}) == ()
    assert gpu_memory({}) == ()
    before = set(sys.modules)
    gpu_memory()
    library_versions()
    assert {"torch", "vllm"} & (set(sys.modules) - before) == set()


def test_the_versions_of_libraries_that_are_loaded_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="9.9"))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace())
    assert library_versions() == {"vllm": "9.9"}
