"""Control calls of a hub's Python API: one call to every replica of some stages."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hub.orchestrator.collective import CollectiveCall, ReplicaResult
from hub.request.nesting import check_nesting
from hub.request.plan import StageGraph
from omni_discovery.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from omni_discovery.wire import MAX_CONTROL_BYTES

if TYPE_CHECKING:
    from hub.orchestrator.orchestrator import Orchestrator

logger = logging.getLogger(__name__)

#: Unknown stages that a warning names.
_MOST_NAMED: Final = 10
#: How much longer than its timeout a call may take in the orchestrator, in seconds.
_SLACK_S: Final = 5.0
_MAX_NAME: Final = 200
_MAX_TIMEOUT_S: Final = 1e9


class CollectiveCalls(ABC):
    """The control calls. All but ``collective`` pass keyword arguments such as ``stage_ids`` and ``timeout`` to it.

    Which methods there are depends on the engine. ``timeout`` is in seconds, and named as in vLLM.
    """

    graph: StageGraph

    @abstractmethod
    def check_serving(self) -> None:
        """Raise RequestError if this hub can't serve any request."""

    @abstractmethod
    def _running_orchestrator(self) -> Orchestrator:
        """The orchestrator. Raise RequestError if it was not started."""

    async def collective(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        stage_ids: Sequence[int] | None = None,
        timeout: float | None = 60.0,  # noqa: ASYNC109 - as vLLM has it
        *,
        call_id: str = "",
    ) -> list[ReplicaResult]:
        """Call a control method on every replica of the stages (None: all); return one result for each replica.

        Results are sorted by stage and replica, and include replicas that failed, were lost, have no session, or did
        not answer within ``timeout`` (None: wait for all that are there). Values are JSON-like. Stages that the
        pipeline has not are left out with a warning in the log. Raise InvalidRequestError for wrong arguments and where
        no stage is left, OverloadedError if too many calls are open, RuntimeError if one with the same ``call_id`` is,
        RequestError if the hub does not run.
        """
        stages = self.graph.stage_ids if stage_ids is None else tuple(stage_ids)
        unknown = self.unknown_stages(stages)
        if unknown:
            logger.warning("collective.unknown_stage method=%r: %s", method[:_MAX_NAME], unknown)
            stages = tuple(stage_id for stage_id in stages if stage_id in self.graph.stage_ids)
            if not stages:
                raise InvalidRequestError(unknown)
        self._check_call(method, args, kwargs or {}, timeout, call_id)
        done: asyncio.Future[list[ReplicaResult]] = asyncio.get_running_loop().create_future()
        call_id = call_id or uuid.uuid4().hex
        call = CollectiveCall(call_id, method, tuple(args), dict(kwargs or {}), stages, timeout, done)
        orchestrator = self._running_orchestrator()
        self.check_serving()
        try:
            orchestrator.rpc_async_queue.put_nowait(call)
        except asyncio.QueueFull:
            raise OverloadedError("too many calls wait in this hub") from None
        try:
            async with asyncio.timeout(None if timeout is None else timeout + _SLACK_S):
                return await done
        except TimeoutError:
            raise DeadlineExceededError(f"the hub did not come to {method!r} within {timeout:g} s") from None

    def unknown_stages(self, stage_ids: Iterable[int]) -> str:
        """That the pipeline has not all of these stages, as text; empty if it has."""
        known = self.graph.stage_ids
        unknown = list(dict.fromkeys(stage_id for stage_id in stage_ids if stage_id not in known))
        if not unknown:
            return ""
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        named = ", ".join(f"{stage_id!r:.40}" for stage_id in unknown[:_MOST_NAMED])
        return f"the pipeline has no stage {named}{more}; it has {', '.join(map(str, known))}"

    def _check_call(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        call_id: str,
    ) -> None:
        if not 0 < len(method) <= _MAX_NAME or len(call_id) > _MAX_NAME:
            raise InvalidRequestError(f"the names of a method and of a call have 1 to {_MAX_NAME} characters")
        if timeout is not None and not (math.isfinite(timeout) and 0 < timeout <= _MAX_TIMEOUT_S):
            raise InvalidRequestError(f"timeout must be a number above 0, not {timeout!r}")
        check_nesting("the arguments", args)
        check_nesting("the arguments", kwargs)
        try:
            size_bytes = len(msgspec.msgpack.encode((tuple(args), dict(kwargs))))
        except (TypeError, OverflowError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the arguments can't be sent: {error}") from error
        if size_bytes > MAX_CONTROL_BYTES:
            raise InvalidRequestError(f"arguments of {size_bytes} bytes, where {MAX_CONTROL_BYTES} may be sent")

    async def start_profile(self, profile_prefix: str | None = None, **where: Any) -> list[ReplicaResult]:
        """Start to record a profile; the engine's settings say where it is written."""
        return await self.collective("start_profile", () if profile_prefix is None else (profile_prefix,), **where)

    async def stop_profile(self, **where: Any) -> list[ReplicaResult]:
        """End the profile and write it."""
        return await self.collective("stop_profile", **where)

    async def sleep(self, level: int = 1, mode: str = "wait", **where: Any) -> list[ReplicaResult]:
        """Accept no requests, finish those that run, then free memory. A sleeping replica is not picked."""
        if mode != "wait":
            raise InvalidRequestError(f"mode: a replica finishes what runs before it sleeps: 'wait', not {mode!r}")
        return await self.collective("sleep", (level,), **where)

    async def wake_up(self, tags: Sequence[str] | None = None, **where: Any) -> list[ReplicaResult]:
        """End the sleep, or with ``tags`` a part of it."""
        return await self.collective("wake_up", () if tags is None else (list(tags),), **where)

    async def is_sleeping(self, **where: Any) -> list[ReplicaResult]:
        """Which replicas sleep."""
        return await self.collective("is_sleeping", **where)

    async def add_lora(self, name: Any, lora_id: int = 0, path: str = "", **where: Any) -> list[ReplicaResult]:
        """Load an adapter from a path that the replicas can read; in place of the three, vLLM's LoRARequest."""
        if not isinstance(name, str):
            name, lora_id, path = name.lora_name, name.lora_int_id, name.lora_path
        if not path:
            raise InvalidRequestError("add_lora: an adapter has a name, an id above 0, and a path")
        return await self.collective("add_lora", (name, lora_id, path), **where)

    async def remove_lora(self, lora_id: int, **where: Any) -> list[ReplicaResult]:
        """Unload an adapter."""
        return await self.collective("remove_lora", (lora_id,), **where)

    async def list_loras(self, **where: Any) -> list[ReplicaResult]:
        """The ids of the adapters that are loaded."""
        return await self.collective("list_loras", **where)

    async def pin_lora(self, lora_id: int, **where: Any) -> list[ReplicaResult]:
        """Keep an adapter from being evicted by others."""
        return await self.collective("pin_lora", (lora_id,), **where)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False, **where: Any
    ) -> list[ReplicaResult]:
        """Clear the prefix cache; running requests keep theirs, and so do connectors of KV caches."""
        if reset_running_requests or reset_connector:
            raise InvalidRequestError("reset_running_requests, reset_connector: a replica clears its own cache alone")
        return await self.collective("reset_prefix_cache", **where)

    async def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **where: Any
    ) -> list[ReplicaResult]:
        """Call a worker method that the stage's ``engine_args.allow_rpc`` allows by name."""
        return await self.collective("collective_rpc", (method, list(args), dict(kwargs or {})), **where)
