"""Bodies: what costs too much is not decoded at any door; long answers are encoded beside the hub's loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hub.api.audio.speech import parse_speech
from hub.api.chat.schema import parse_chat
from hub.api.generation.body import encode_body, encode_event
from hub.api.images.schema import parse_edit, parse_image
from hub.api.prompts.completions import parse_completion
from hub.api.stream import parse_frame
from hub.api.videos.schema import parse_video
from hub.api.vllm.bounds.body import check_body
from omni_discovery.errors import InvalidRequestError


@pytest.mark.attack("M5")
@pytest.mark.parametrize(("size_bytes", "in_loop"), [(1000, True), (2 << 20, False)])
async def test_what_is_long_is_made_and_encoded_in_a_thread(size_bytes: int, in_loop: bool) -> None:
    makers: list[threading.Thread] = []

    def make() -> dict[str, Any]:
        makers.append(threading.current_thread())
        return {"a": 1}

    assert json.loads(await encode_body(make, size_bytes)) == {"a": 1}
    assert await encode_event(make, size_bytes) == b'data: {"a":1}\n\n'
    assert [each is threading.main_thread() for each in makers] == [in_loop] * 2


#: What took the hub's loop 1.4 s in a body of 1 MiB.
_NUMBERS = "[" + "1e308," * 2000 + "1]"


def _edit(body: bytes) -> Any:
    part = b'--edge\r\nContent-Disposition: form-data; name="metadata"\r\n\r\n%b\r\n--edge--\r\n' % body
    return parse_edit("multipart/form-data; boundary=edge", part)


@pytest.mark.attack("Q1")
@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_chat, '{"messages":[{"role":"user","content":"a"}],"sampling_params_list":[{"x":%s}]}'),
        (parse_chat, '{"messages":[{"role":"user","content":"a"}],"unknown":%s}'),
        (parse_completion, '{"prompt":"a","sampling_params_list":[{"x":%s}]}'),
        (parse_speech, '{"input":"a","metadata":%s}'),
        (parse_image, '{"prompt":"a","metadata":%s}'),
        (lambda body: parse_video("application/json", body), '{"prompt":"a","metadata":%s}'),
        (_edit, '{"a":%s}'),
        (lambda body: parse_frame(body.decode()), '{"type":"segment","prompt":"a","sampling_params_list":[{"x":%s}]}'),
        (check_body, '{"prompt":"a","tools":%s}'),
        (check_body, '{"prompt":"a","structured_outputs":{"json":%s}}'),
        (check_body, '{"prompt":"a","anything":%s}'),
    ],
)
def test_numbers_that_take_long_to_be_read_are_refused_at_each_door(parse: Callable[[bytes], Any], body: str) -> None:
    with pytest.raises(InvalidRequestError, match="more than 1024 numbers with exponents of three digits"):
        parse((body % _NUMBERS).encode())
