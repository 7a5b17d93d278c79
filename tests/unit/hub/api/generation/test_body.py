"""Bodies of answers: long ones are encoded beside the hub's loop."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from hub.api.generation.body import encode_body, encode_event


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
