"""The LoRA adapters that vLLM's server knows by name, as the stage gets them.

A request says its adapter's name and path, and a replica that has not loaded it yet does so before it begins. So
nothing has to be told to a replica that joins or is restarted, and hubs need not agree on what there is. The path is
one on the replicas' machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hub.api.vllm_errors import as_vllm_error
from omni_discovery.errors import InvalidRequestError, OmniError, RequestError

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni

_LOAD_S: Final = 120.0
#: How the result of a replica begins that was not asked at all: it loads the adapter with the first request for it.
_NOT_ASKED: Final = ("NotConnectedError: ", "ReplicaLostError: ")


class StageAdapters:
    """Of one stage, and of the stages that prefill for it. ``takes``: whether they take adapters."""

    def __init__(self, omni: AsyncOmni, stage_id: int, *, takes: bool) -> None:
        self._omni = omni
        self._stage_id = stage_id
        self._stage_ids = (*omni.graph.deploy.inputs_of(stage_id), stage_id)
        self._takes = takes
        #: Whether replicas load an adapter as it is added. Not while the hub starts: there need not be any yet.
        self.loads = False

    def params(self, params: Mapping[str, Any], adapter: Any, salt: str | None = None) -> dict[int, Mapping[str, Any]]:
        """What a request with that LoRARequest, or with None, asks of each stage; ``salt`` is its cache_salt."""
        told: dict[str, Any] = {} if adapter is None else {"lora": _described(adapter)}
        if salt:
            told["cache_salt"] = salt
        if not told:
            return {self._stage_id: params}
        return dict.fromkeys(self._stage_ids, told) | {self._stage_id: {**params, **told}}

    async def add(self, adapter: Any) -> bool:
        """Have the replicas load it, to see that they can. Raise VLLMError that names one that could not.

        Who has no session with this hub does it later, unless weights change in place: all have to do that now.
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
