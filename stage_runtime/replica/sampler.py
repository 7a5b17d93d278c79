"""The thread that samples the state of a replica once a second, for the metrics that its supervisor shows."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from omni_discovery.metrics.samples import SAMPLE_INTERVAL_S, GpuMemory, ReplicaSample
from stage_runtime.status_pipe import Sampled, WriteStatus

logger = logging.getLogger(__name__)


class Sampler:
    """Writes what ``take_sample()`` returns, from ``start`` to ``stop``; nothing while that is None."""

    def __init__(
        self,
        take_sample: Callable[[], ReplicaSample | None],
        write_status: WriteStatus,
        interval_s: float = SAMPLE_INTERVAL_S,
    ) -> None:
        self._take_sample = take_sample
        self._write_status = write_status
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replica-sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread; return after ``timeout_s`` also if it has not ended. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        has_failed = False
        while not self._stopped.wait(self._interval_s):
            try:
                sample = self._take_sample()
                if sample is not None:
                    self._write_status(Sampled(sample))
            except Exception:
                if not has_failed:
                    logger.exception("replica.not_sampled: it is tried again; further failures are not logged")
                has_failed = True


def gpu_memory(modules: Mapping[str, Any] | None = None) -> tuple[GpuMemory, ...]:
    """The memory of the GPUs on which this process has allocated any; empty if torch is not loaded or has no GPU.

    Other GPUs are left alone: to ask for the memory of one takes some of it.
    """
    torch = (sys.modules if modules is None else modules).get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return ()
    found = []
    for index in range(cuda.device_count()):
        if cuda.memory_reserved(index):
            free, total = cuda.mem_get_info(index)
            found.append(GpuMemory(index, total - free, total))
    return tuple(found)


def library_versions() -> dict[str, str]:
    """The versions of vLLM and torch, as far as this process has loaded them."""
    versions = {name: getattr(sys.modules.get(name), "__version__", "") for name in ("vllm", "torch")}
    return {name: str(version) for name, version in versions.items() if version}
