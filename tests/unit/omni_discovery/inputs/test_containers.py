"""How many lists and objects a body holds, without decoding it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.containers import MAX_CONTAINERS, _containers_in, check_containers


@pytest.mark.attack("D5")
@pytest.mark.parametrize("many", [b"[]," * (MAX_CONTAINERS + 1), b'{"a":{}},' * MAX_CONTAINERS, b"[" * 100_000])
def test_a_body_of_too_many_lists_and_objects_is_refused(many: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_CONTAINERS} lists and objects"):
        check_containers(b'{"messages":[{"role":"user","content":"w [","z":[' + many + b"1]}]}")


def test_a_prompt_full_of_brackets_is_fine() -> None:
    code = 'if (x[1]) { say("\\\\"); y["{\\""] = [[]]; }\n' * 60_000
    body = json.dumps({"messages": [{"role": "user", "content": code}, {"role": "user", "content": ""}]}).encode()
    assert body.count(b"[") + body.count(b"{") > MAX_CONTAINERS
    check_containers(body)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ({"a": ["[", "]", '"[', "\\", '\\"[', {"b": "{"}]}, 3),
        (["", "[", "", [], {"": "", "{": ""}], 3),
        ("[[[", 0),
        ([[[["\\\\"], "\\["], '\\\\"['], [{}]], 6),
        (7, 0),
    ],
)
def test_brackets_in_strings_are_not_counted(value: Any, count: int) -> None:
    assert _containers_in(json.dumps(value).encode()) == count
    assert _containers_in(json.dumps(value, indent=1, ensure_ascii=False).encode()) == count
