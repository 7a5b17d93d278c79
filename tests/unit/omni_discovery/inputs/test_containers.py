"""How many lists, objects and values a body holds, without decoding it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.containers import (
    MAX_CONTAINERS,
    MAX_OBJECTS,
    MAX_VALUES,
    _number_of,
    check_containers,
    check_objects,
    check_values,
)


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
    assert _number_of(b"[{", json.dumps(value).encode()) == count
    assert _number_of(b"[{", json.dumps(value, indent=1, ensure_ascii=False).encode()) == count


@pytest.mark.attack("O5")
@pytest.mark.parametrize("many", [b"1," * (MAX_VALUES + 1), b'"a",' * (MAX_VALUES + 1), b'"a":{},' * (MAX_VALUES + 1)])
def test_a_body_of_too_many_values_is_refused(many: bytes) -> None:
    """Four million token ids fit into 8 MiB, and take the loop for seconds once they are decoded."""
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_VALUES} values"):
        check_values(b'{"prompt":[' + many + b"1]}")


def test_as_many_token_ids_as_a_request_may_have_and_texts_full_of_commas_are_fine() -> None:
    check_values(b'{"prompt":[' + b"1," * (MAX_VALUES - 1) + b"1]}")
    check_values(json.dumps({"prompt": ',", \\",' * MAX_VALUES, "max_tokens": 1}).encode())


@pytest.mark.attack("P20")
def test_objects_of_all_parts_of_a_body_are_counted_together() -> None:
    half = json.dumps([{"role": "user", "content": "{"}] * (MAX_OBJECTS // 2)).encode()
    check_objects([half, b"[7]", half])
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_OBJECTS} objects beside its tools and forms"):
        check_objects([half, b"{}", half])
