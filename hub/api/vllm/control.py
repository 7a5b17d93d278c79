"""Control calls and LoRA adapters of vLLM's server, passed on to every replica of the stage.

A request carries its adapter's name and path, and a replica that has not loaded the adapter does so before it starts
the request. So a replica that joins or restarts needs no list of adapters, and hubs need not agree on one. The path is
one on the replicas' machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from hub.api.vllm.errors import as_vllm_error
from omni_discovery.errors import InvalidRequestError, OmniError, RequestError, StageUnavailableError

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni


class StageControl:
    """Each method calls every replica of the stage. Raise VLLMError that names a replica on which it failed."""

    def __init__(self, omni: AsyncOmni, stage_id: int) -> None:
        self._omni = omni
        self._stage_id = stage_id

    async def call(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = 60.0,  # noqa: ASYNC109 - as vLLM has it
    ) -> list[Any]:
        """The result of each replica. Raise VLLMError."""
        try:
            results = await self._omni.collective(method, args, kwargs, [self._stage_id], timeout)
            if not results:
                raise StageUnavailableError(self._stage_id, f"stage {self._stage_id} has no replica")
            for result in results:
                if not result.ok:
                    where = f"{result.stage_id}/{result.replica_id}"
                    raise RequestError(f"{method} failed at replica {where} of {len(results)}: {result.error}")
        except OmniError as error:
            raise as_vllm_error(error) from error
        return [result.result for result in results]

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory once the requests in flight have ended: ``mode`` has to be ``wait``."""
        if mode != "wait":
            raise as_vllm_error(InvalidRequestError("a stage sleeps once what runs has ended: say mode=wait"))
        await self.call("sleep", [level])

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Wake the stage up; return whether every replica is awake."""
        await self.call("wake_up", [tags])
        return not await self.is_sleeping()

    async def is_sleeping(self) -> bool:
        """Whether any replica sleeps."""
        return any(await self.call("is_sleeping"))

    async def start_profile(self, profile_prefix: str | None = None, **bounds: int | None) -> None:
        """Start to record a profile."""
        given = {name: value for name, value in bounds.items() if value is not None}
        await self.call("start_profile", [] if profile_prefix is None else [profile_prefix], given)

    async def stop_profile(self) -> None:
        """End the profile."""
        await self.call("stop_profile")

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache; return whether every replica did."""
        return all(await self.call("reset_prefix_cache", [reset_running_requests, reset_connector]))

    async def scale_elastic_ep(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError, which vLLM's server answers as the client's mistake: a hub doesn't scale replicas."""
        raise ValueError("this hub has no part in how many replicas there are: start and stop them with omni serve")

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - as vLLM has it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method that ``engine_args.allow_rpc`` names on all workers: one list for each replica."""
        return await self.call("collective_rpc", [method, list(args), kwargs or {}], timeout=timeout)


_LOAD_S: Final = 120.0
#: Errors of a replica that the call did not reach: it loads the adapter with the first request for it.
_NOT_ASKED: Final = ("NotConnectedError: ", "ReplicaLostError: ")


class StageAdapters:
    """The adapters of one stage and of the stages that prefill for it. ``takes``: whether they take adapters."""

    def __init__(self, omni: AsyncOmni, stage_id: int, *, takes: bool) -> None:
        self._omni = omni
        self._stage_id = stage_id
        self._stage_ids = (*omni.graph.deploy.inputs_of(stage_id), stage_id)
        self._takes = takes
        #: Whether an added adapter is loaded at once. Not while the hub starts: there may be no replica yet.
        self.loads = False

    def params(self, params: Mapping[str, Any], adapter: Any, salt: str | None = None) -> dict[int, Mapping[str, Any]]:
        """The parameters of each stage for a request with a LoRARequest or None; ``salt`` is its cache_salt."""
        shared: dict[str, Any] = {} if adapter is None else {"lora": _described(adapter)}
        if salt:
            shared["cache_salt"] = salt
        if not shared:
            return {self._stage_id: params}
        return dict.fromkeys(self._stage_ids, shared) | {self._stage_id: {**params, **shared}}

    async def add(self, adapter: Any) -> bool:
        """Load the adapter on all replicas, as a check. Raise VLLMError that names a replica that can't load it.

        A replica without a session loads it later, unless weights change in place: all replicas have to do that now.
        """
        in_place = bool(getattr(adapter, "load_inplace", False))
        more = _described(adapter)
        args = [more.pop("name"), None, more.pop("path"), {**more, "load_inplace": in_place}]
        try:
            if not self._takes:
                raise InvalidRequestError("adapters are only taken where the stage's engine_args.enable_lora is true")
            if not self.loads:
                return True
            results = await self._omni.collective("add_lora", args, None, self._stage_ids, _LOAD_S)
            for result in results:
                if not result.ok and (in_place or not result.error.startswith(_NOT_ASKED)):
                    where = f"{result.stage_id}/{result.replica_id}"
                    raise RequestError(f"replica {where} of {len(results)} can't load the adapter: {result.error}")
        except OmniError as error:
            raise as_vllm_error(error) from error
        return True


def _described(adapter: Any) -> dict[str, Any]:
    more = {"is_3d_lora_weight": True} if getattr(adapter, "is_3d_lora_weight", False) else {}
    return {"name": adapter.lora_name, "path": adapter.lora_path, **more}
