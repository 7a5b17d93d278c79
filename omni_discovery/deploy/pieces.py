"""Which edges with ``async_chunk`` let the next stage answer while the one before still runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omni_discovery.deploy.document import DeployConfig

#: Built-in engines that put nothing out before the last piece of their input has come.
_ANSWER_LAST: Final[Mapping[str, str]] = {
    "vllm": "reads the pieces ahead, which shortens the wait for its first token, and answers once its prompt is whole",
    "diffusion": "begins once all pieces are there",
}
#: Those that hand over whole.
_MAKE_NONE: Final[Mapping[str, str]] = {"diffusion": "makes no pieces"}


def why_late(deploy: DeployConfig, before: int, after: int) -> str:
    """Why a stage answers only when the one before has ended, though their edge has ``async_chunk``; empty if not so.

    Of engines of other packages it is not known, and of ``torch`` only where its function is loaded.
    """
    if not deploy.async_chunk_of(before, after):
        return ""
    maker, taker = deploy.stage(before), deploy.stage(after)
    reasons = [
        _of(maker.stage_id, maker.engine, _MAKE_NONE),
        *(
            f"stage {each.stage_id} has engine_args.async_chunk: false, and vLLM-Omni then hands over whole"
            for each in (maker, taker)
            if each.engine == "vllm-omni" and not each.engine_args.get("async_chunk", False)
        ),
        _of(taker.stage_id, taker.engine, _ANSWER_LAST),
    ]
    return next(filter(None, reasons), "")


def late_edges(deploy: DeployConfig) -> list[str]:
    """One sentence for each edge whose ``async_chunk`` does less than one may expect."""
    return [
        f"edge {before} to {stage.stage_id}: async_chunk does not have stage {stage.stage_id} answer while stage"
        f" {before} still runs: {why}"
        for stage in deploy.stages
        for before in deploy.inputs_of(stage.stage_id)
        if (why := why_late(deploy, before, stage.stage_id))
    ]


def _of(stage_id: int, engine: str, reasons: Mapping[str, str]) -> str:
    why = reasons.get(engine, "")
    return f"engine {engine!r} of stage {stage_id} {why}" if why else ""
