"""The methods of vLLM's EngineClient that AsyncOmni has beside its own. Needs no vLLM.

A program that was written for vLLM's AsyncLLM finds each method that the class declares. What one hub can't do for all
its replicas raises NotImplementedError with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NoReturn

from omni_discovery.errors import HubUnavailableError, OmniError

#: What is refused, and why.
REFUSED: Final = {
    "encode": "ask by generate: embeddings and scores come as outputs (params {STAGE: {'task': 'embed'}})",
    "reset_encoder_cache": "replicas have no such call",
    "pause_generation": "a hub stops work for one request (abort), and replicas by 'omni drain' and 'omni cordon'",
    "resume_generation": "a hub can't pause replicas; 'omni uncordon' has them take work again",
    "scale_elastic_ep": "replicas are added with omni serve --headless --omni-dp-size-local",
    **dict.fromkeys(
        (
            *("handle_fault", "get_status", "init_weight_transfer_engine", "start_weight_update"),
            *("start_draft_weight_update", "update_weights", "finish_weight_update", "update_weight_version"),
            *("get_weight_version", "compute_weight_checksums", "shutdown_weight_transfer_engine"),
            *("get_kv_event_sources", "release_kv_cache_memory"),
        ),
        "this hub speaks for many replicas, which have no such call",
    ),
}


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(_self: object, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {REFUSED[name]}")

    refuse.__doc__ = f"Raise NotImplementedError: {REFUSED[name]}."
    return refuse


def _of_one_model(name: str) -> property:
    def refuse(_self: object) -> NoReturn:
        raise AttributeError(f"{name}: a hub holds no model; omni serve --api vllm puts vLLM's server over a stage")

    return property(refuse)


class EngineProtocol:
    """See the module. A hub has the first three methods."""

    #: Whether requests become spans, so that their trace headers matter.
    is_traced: bool
    _closing: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        raise NotImplementedError

    def check_serving(self) -> None:
        """Raise RequestError if this hub can't serve any request, with whatever replicas."""
        raise NotImplementedError

    async def close(self) -> None:
        """End every request and close every socket. Idempotent."""
        raise NotImplementedError

    @property
    def is_stopped(self) -> bool:
        """Whether no request is accepted, because the hub was not started yet or was closed."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the hub can't serve any request, with whatever replicas."""
        return self._trouble() is not None

    @property
    def dead_error(self) -> BaseException:
        """The error of requests while ``errored``."""
        return self._trouble() or HubUnavailableError(0, "the hub is stopping")

    async def check_health(self) -> None:
        """Raise RequestError if this hub can't serve; that a stage has no replica now is no reason."""
        self.check_serving()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What vLLM's server may ask of it."""
        return ("generate",)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Do nothing: ``generate`` raises OverloadedError at its first output, before anything has run."""

    async def is_tracing_enabled(self) -> bool:
        """Whether trace headers matter."""
        return self.is_traced

    async def is_paused(self) -> bool:
        """False: a hub can't pause its replicas."""
        return False

    async def do_log_stats(self) -> None:
        """Do nothing: each replica logs its own, and hubs with ``--log-stats``."""

    async def reset_mm_cache(self) -> None:
        """Do nothing: a hub has no such cache."""

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Do nothing: no KV cache is kept for a request that was not admitted."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Begin to close, on the running loop. ``close`` is to be awaited where one has to know that it is over."""
        del timeout
        self._closing = asyncio.get_running_loop().create_task(self.close())

    encode = _refusing("encode")
    reset_encoder_cache = _refusing("reset_encoder_cache")
    pause_generation = _refusing("pause_generation")
    resume_generation = _refusing("resume_generation")
    scale_elastic_ep = _refusing("scale_elastic_ep")
    handle_fault = _refusing("handle_fault")
    get_status = _refusing("get_status")
    init_weight_transfer_engine = _refusing("init_weight_transfer_engine")
    start_weight_update = _refusing("start_weight_update")
    start_draft_weight_update = _refusing("start_draft_weight_update")
    update_weights = _refusing("update_weights")
    finish_weight_update = _refusing("finish_weight_update")
    update_weight_version = _refusing("update_weight_version")
    get_weight_version = _refusing("get_weight_version")
    compute_weight_checksums = _refusing("compute_weight_checksums")
    shutdown_weight_transfer_engine = _refusing("shutdown_weight_transfer_engine")
    get_kv_event_sources = _refusing("get_kv_event_sources")
    release_kv_cache_memory = _refusing("release_kv_cache_memory")
    vllm_config = _of_one_model("vllm_config")
    model_config = _of_one_model("model_config")
    renderer = _of_one_model("renderer")
    input_processor = _of_one_model("input_processor")

    def _trouble(self) -> OmniError | None:
        try:
            self.check_serving()
        except OmniError as error:
            return error
        return None
