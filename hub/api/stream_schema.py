"""What the frames of /v1/stream may hold, checked at the door."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from omni_discovery.data_urls import picture_parts
from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import MAX_PRIORITY


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="segment"):
    """A piece of the input; ``last``: no other follows. All but the input and ``last`` belong to the first one only."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]] | None = None
    last: bool = False
    model: str = ""
    modalities: Annotated[list[str], msgspec.Meta(min_length=1, max_length=8)] | None = None
    sampling_params_list: list[dict[str, Any] | None] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0

    def inputs(self) -> dict[str, Any]:
        """What the stages get of it."""
        given = {"prompt": self.prompt, "messages": self.messages, "prompt_token_ids": self.prompt_token_ids}
        return {name: value for name, value in given.items() if value is not None}

    def check_later(self) -> None:
        """Raise InvalidRequestError if it says of the request what only the first segment can say."""
        told = {
            "model": self.model,
            "modalities": self.modalities,
            "sampling_params_list": self.sampling_params_list,
            "timeout": self.timeout,
            "priority": self.priority,
        }
        late = [name for name, value in told.items() if value]
        if late:
            raise InvalidRequestError(f"'{late[0]}' belongs to the first segment; the request has begun")


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="end"):
    """No segment follows."""


_decoder: msgspec.json.Decoder[Segment | End] = msgspec.json.Decoder(Segment | End)


def parse_frame(text: str | None) -> Segment | End:
    """Read and check a frame; None: it was not text. Raise InvalidRequestError that names the field."""
    if text is None:
        raise InvalidRequestError("a frame is JSON text, not binary")
    try:
        frame = _decoder.decode(text)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the frame can't be used: {error}".replace("`", "'")) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"the frame is not JSON: {error}") from error
    if isinstance(frame, Segment) and len(frame.inputs()) != 1:
        raise InvalidRequestError("a segment holds one of 'prompt', 'messages' and 'prompt_token_ids'")
    if isinstance(frame, Segment) and picture_parts(frame.messages):
        raise InvalidRequestError("pictures come whole, not in segments: send them to POST /v1/chat/completions")
    return frame
