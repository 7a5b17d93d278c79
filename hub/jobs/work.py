"""The work of one job: a request to the pipeline, whose only answer is one video."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import msgspec

from omni_discovery.errors import (
    DeadlineExceededError,
    EngineFailedError,
    HubUnavailableError,
    InvalidRequestError,
    OmniError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
    StageUnavailableError,
)

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni

VIDEO: Final = "video"
#: How often a job is tried by one hub whose replicas have no place or are lost, and the longest pause between two.
MOST_TRIES: Final = 8
_LONGEST_PAUSE_S: Final = 30.0


class JobWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a job asks of the pipeline; see ``AsyncOmni.generate``. It lies in the job store, encrypted."""

    inputs: dict[str, Any]
    params: dict[int, dict[str, Any]] = {}
    timeout_s: float | None = None
    priority: int = 0
    async_chunk: bool | None = None
    label: str = ""


def encode_work(work: JobWork) -> bytes:
    """The content of the file of a request. Raise InvalidRequestError for a number that has no place there."""
    try:
        return msgspec.msgpack.encode(work)
    except OverflowError as error:
        raise InvalidRequestError("a number of the request has more than 64 bits") from error


def decode_work(content: bytes) -> JobWork:
    """The work in a file. Raise InvalidRequestError for that of another release, which this one can't read."""
    try:
        return msgspec.msgpack.decode(content, type=JobWork)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the request can't be read by this release: {error}") from error


async def make_video(omni: AsyncOmni, work: JobWork, request_id: str, key: str) -> bytes:
    """The video that the work asks for, as a file. Raise OmniError."""
    outputs = omni.generate(
        work.inputs,
        request_id=request_id,
        modalities=(VIDEO,),
        params=work.params,
        timeout_s=work.timeout_s,
        priority=work.priority,
        async_chunk=work.async_chunk,
        label=work.label,
        key=key,
    )
    made = b""
    async with aclosing(outputs):
        async for output in outputs:
            if output.modality == VIDEO and output.data:
                if made:
                    raise EngineFailedError("the stages have made several videos, where one was asked for")
                made = output.data
    if not made:
        raise InvalidRequestError("no video was made: the stages before have made nothing of this prompt", 422)
    return made


CLIENTS_FAULT: Final = "invalid_request"
#: The code of the error of a failed job, by the first class that fits.
_CODES: Final[tuple[tuple[type[OmniError], str], ...]] = (
    (InvalidRequestError, CLIENTS_FAULT),
    (OverloadedError, "overloaded"),
    (StageUnavailableError, "stage_unavailable"),
    (ReplicaLostError, "replica_lost"),
    (DeadlineExceededError, "deadline_exceeded"),
    (EngineFailedError, "engine_failed"),
)


def code_of(error: OmniError) -> str:
    """The code of an error, as the routes that answer at once have it."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "internal_error")


def pause_before_retry_s(error: OmniError, tries: int) -> float | None:
    """How long to wait before a job is tried again; None if that would be in vain."""
    if not isinstance(error, RequestError) or error.retry_after_s is None or tries >= MOST_TRIES:
        return None
    return min(_LONGEST_PAUSE_S, error.retry_after_s * 2.0 ** (tries - 1))


def is_of_this_hub(error: OmniError) -> bool:
    """Whether only this hub can't serve the job."""
    return isinstance(error, HubUnavailableError)
