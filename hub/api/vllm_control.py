"""What vLLM's server asks of a whole engine, asked of every replica of the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hub.api.vllm_errors import as_vllm_error
from omni_discovery.errors import InvalidRequestError, OmniError, RequestError, StageUnavailableError

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni


class StageControl:
    """Each method reaches every replica of the stage, or raises VLLMError that names one that failed."""

    def __init__(self, omni: AsyncOmni, stage_id: int) -> None:
        self._omni = omni
        self._stage_id = stage_id

    async def call(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """What each replica answered."""
        try:
            results = await self._omni.collective(method, args, kwargs, [self._stage_id], timeout_s or 60.0)
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
        """Give memory back, once what runs has ended: ``mode`` has to be ``wait``."""
        if mode != "wait":
            raise as_vllm_error(InvalidRequestError("a stage sleeps once what runs has ended: say mode=wait"))
        await self.call("sleep", [level])

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Take work again; whether every replica does."""
        await self.call("wake_up", [tags])
        return not await self.is_sleeping()

    async def is_sleeping(self) -> bool:
        """Whether one of the replicas is."""
        return any(await self.call("is_sleeping"))

    async def start_profile(self, profile_prefix: str | None = None, **bounds: int | None) -> None:
        """Begin to trace."""
        given = {name: value for name, value in bounds.items() if value is not None}
        await self.call("start_profile", [] if profile_prefix is None else [profile_prefix], given)

    async def stop_profile(self) -> None:
        """End the trace."""
        await self.call("stop_profile")

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget the prefixes; whether every replica could."""
        return all(await self.call("reset_prefix_cache", [reset_running_requests, reset_connector]))

    async def scale_elastic_ep(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError, which vLLM's server takes for the client's mistake: replicas come and go by themselves."""
        raise ValueError("this hub has no part in how many replicas there are: start and stop them with omni serve")

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - as vLLM has it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker that ``engine_args.allow_rpc`` names: one list for each replica."""
        return await self.call("collective_rpc", [method, list(args), kwargs or {}], timeout_s=timeout)
