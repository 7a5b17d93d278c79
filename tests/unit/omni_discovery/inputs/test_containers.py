"""How many lists, objects and values a body holds, without decoding it."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import msgspec
import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.containers import (
    MAX_CONTAINERS,
    MAX_EXTREMES,
    MAX_NAMES,
    MAX_OBJECTS,
    MAX_VALUES,
    _number_of,
    check_arguments,
    check_containers,
    check_objects,
    check_text,
    check_values,
    decode_any,
    has_many_extremes,
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


@pytest.mark.attack("R41")
def test_a_body_of_too_many_names_is_refused() -> None:
    """Half a million fit into 6 MB, and held the hub's loop for a second; neither objects nor values counted them."""
    names = {f"{number:x}": 1 for number in range(MAX_NAMES)}
    check_text(json.dumps(names).encode())
    check_text(json.dumps({"messages": [{"content": "a: {'b': 1}, \": " * MAX_NAMES}]}).encode())
    for body in (
        {"logit_bias": names},
        {"messages": [{"role": "user", **names}]},
        {"a": [{"b": 1, "c": 2}] * (MAX_CONTAINERS - 9)},
    ):
        with pytest.raises(InvalidRequestError, match=f"more than {MAX_NAMES} names"):
            check_text(json.dumps(body).encode())


@pytest.mark.attack("P20")
def test_objects_of_all_parts_of_a_body_are_counted_together() -> None:
    half = json.dumps([{"role": "user", "content": "{"}] * (MAX_OBJECTS // 2)).encode()
    check_objects([half, b"[7]", half])
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_OBJECTS} objects beside its tools and forms"):
        check_objects([half, b"{}", half])


@pytest.mark.attack("Q1")
@pytest.mark.parametrize(
    "number", ["1e308", "-9E+307", "1.5e-310", "1e-0323", "0.0000001e308", "1" * 20 + "e288", "5e-00000000000000324"]
)
@pytest.mark.parametrize("between", [",", " ,\n", ',"a",', ',"",', ',"\\\\","\\"",', ',{"e":true},', ",[false],1e3,"])
def test_a_text_of_too_many_numbers_that_take_long_is_refused(number: str, between: str) -> None:
    """3 MiB of them took the hub's loop 4 s, where as many others take 0.1 s."""
    body = '{"a":[' + between.join([number] * (MAX_EXTREMES + 1)) + '],"b":"%s"}'
    assert json.loads(body)
    for text in ("", "x" * 100_000):
        with pytest.raises(InvalidRequestError, match=f"more than {MAX_EXTREMES} numbers with exponents of three"):
            check_text((body % text).encode())
    # Up to its last number, a text that is none costs as much.
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_EXTREMES} numbers"):
        check_text((body % "")[:-3].encode())


@pytest.mark.parametrize(
    "text",
    [
        "1e308, " * 300_000,
        '\n1e308\t"5e-324" \\' * 100_000,
        random.Random(5).randbytes(1_000_000).hex(),
        '{"a":[' + "1e308," * 100_000 + "1]}",
    ],
)
def test_text_that_is_full_of_such_numbers_is_fine(text: str) -> None:
    check_text(json.dumps({"messages": [{"role": "user", "content": text}], "metadata": {"": "", "a": "e"}}).encode())
    check_text(json.dumps([text[place : place + 9] for place in range(0, len(text), 9)]).encode())


def test_numbers_that_cost_no_more_than_others_are_fine() -> None:
    many = [0.5, 1e22, 1.25e-99, -3, 12345678901234567890, True, False, None] * 60_000
    check_text(json.dumps({"embedding": many, "bias": [1e-300, 1e308] * (MAX_EXTREMES // 2)}).encode())
    assert not has_many_extremes(b"[1e30" + b",1e30" * 10_000 + b"8]")


def test_json_of_any_kind_is_read_as_it_was() -> None:
    assert decode_any('[1, -0.5, 1e308, "1e308", {"a": null}]') == [1, -0.5, 1e308, "1e308", {"a": None}]
    assert decode_any(b"[5e-324, -1.7976931348623157e308]") == [5e-324, -1.7976931348623157e308]
    assert [type(each) for each in decode_any(b"[7, 7.0, 123456789012345678901]")] == [int, float, int]
    for wrong in (b"[1e309]", b"[NaN]", b"[1e]", b"{"):
        with pytest.raises(msgspec.DecodeError):
            decode_any(wrong)


@pytest.mark.attack("Q1")
def test_where_any_json_is_read_such_numbers_take_about_as_long_as_others() -> None:
    """There each took forty times as long."""

    def took_s(number: bytes) -> float:
        text = b"[" + b",".join([number] * 20_000) + b"]"
        begin_s = time.process_time()
        decode_any(text)
        return time.process_time() - begin_s

    assert min(took_s(b"1e308") for _ in range(5)) < 10 * min(took_s(b"0.5") for _ in range(5))


def with_arguments(*texts: str) -> list[Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": text}} for text in texts]
    return [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]


@pytest.mark.attack("Y5")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" + "[]," * MAX_CONTAINERS + "[]]", "lists and objects"),
        ("[" + "{}," * MAX_CONTAINERS + '"an open string', "lists and objects"),
        ("{" + '"a":1,' * MAX_NAMES + '"b":2}', "names"),
        ("[" + "1," * (MAX_VALUES + 1) + "1]", "values"),
        ("[" + "1e300," * MAX_EXTREMES + "1e300]", "exponents of three digits"),
    ],
)
def test_arguments_of_calls_have_the_bounds_of_a_body(text: str, said: str) -> None:
    for prompt in (
        with_arguments(text),
        [with_arguments(text)],
        [{"type": "function_call", "name": "f", "arguments": text}],
        [{"role": "assistant", "function_call": {"name": "f", "arguments": text}}],
    ):
        with pytest.raises(InvalidRequestError, match=f"the arguments .*{said}"):
            check_arguments([prompt])
    half = text[: len(text) // 2 + 8]
    if "exponents" not in said:
        with pytest.raises(InvalidRequestError, match=said):
            check_arguments([with_arguments(half, half), with_arguments(half)])


def test_arguments_that_are_plain_pass() -> None:
    check_arguments([with_arguments('{"city": "Oslo", "days": [1, 2]}', "no JSON", ""), "a prompt", [1, 2], None])
    check_arguments([with_arguments(json.dumps({"code": "[[" * MAX_CONTAINERS}))])
