"""What a body to vLLM's server may cost to be checked."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import nullcontext
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from hub.api.vllm.bounds import body
from hub.api.vllm.bounds.body import (
    MAX_CONVERSATIONS,
    MAX_NAMES,
    MAX_REPEATED_BYTES,
    Asked,
    Body,
    check_body,
    checked_aside,
    counted_bytes,
)
from omni_discovery.errors import InvalidRequestError, OverloadedError
from omni_discovery.inputs.answer_form import MAX_COST, MAX_FORM
from omni_discovery.inputs.containers import MAX_CONTAINERS, MAX_MESSAGE_VALUES, MAX_OBJECTS

SCOPE = {"type": "http", "client": ("10.0.0.1", 1)}


def form_of(size: int, name: str) -> dict[str, Any]:
    """A form that takes steps, and has about so many characters."""
    schema: dict[str, Any] = {"$ref": "#/" + "%41" * (size // 3), "const": name}
    for _ in range(58):
        schema = {"id": "a", "properties": schema}
    return schema


def body_of(size: int, tools: int = 4) -> bytes:
    """A body with all kinds of forms, each of about so many characters."""
    asked = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": form_of(size, "r")}},
        "text": form_of(size, "t"),
        "output_config": form_of(size, "o"),
        "structured_outputs": {"json": form_of(size, "j"), "structural_tag": form_of(size, "s")},
        "tools": [{"function": {"name": f"f{each}", "parameters": form_of(size, "p")}} for each in range(tools)],
    }
    return json.dumps({"messages": [], **asked}).encode()


@pytest.mark.attack("O2")
def test_all_forms_of_a_body_have_one_budget() -> None:
    """Each was checked up to its own bounds: nine took the hub's loop 1.7 s, again for each request."""
    check_body(body_of(20_000))
    with pytest.raises(InvalidRequestError, match=r"^tools\[0\]: with this one the forms and tools .* too many"):
        check_body(body_of(MAX_FORM - 4000))
    text = json.dumps([[]] * 5000)
    with pytest.raises(InvalidRequestError, match=r"^tools\[\d\]: with this one"):
        check_body(json.dumps({"tools": [{"schema": text}] * 9}).encode())


def test_tools_that_were_served_before_and_one_more_form_are_fine() -> None:
    """128 functions of 2 KB each, as MCP servers have them."""
    field = {"type": "string", "description": "what the letters of this argument say to the function"}
    parameters = {"type": "object", "properties": {f"argument_{each}": field for each in range(18)}, "required": []}
    tools = [{"type": "function", "function": {"name": f"f{each}", "parameters": parameters}} for each in range(100)]
    form = {"json": {"type": "object", "properties": {f"property_{each}": {"type": "number"} for each in range(90)}}}
    body = json.dumps({"tools": tools, "structured_outputs": form}).encode()
    assert MAX_COST // 2 < len(body) < MAX_COST
    check_body(body)


@pytest.mark.attack("Z26")
def test_the_functions_of_namespaces_count_with_the_others() -> None:
    """Namespaces counted as one each: of one with 8000 functions vLLM's server made models on the hub's loop."""
    functions = [{"type": "function", "name": f"f{each}", "parameters": {"type": "object"}} for each in range(63)]
    spaces = [{"type": "namespace", "name": name, "description": "", "tools": functions} for name in "ab"]
    tools = [*spaces, functions[0], {"type": "namespace", "name": "empty", "description": "", "tools": []}]
    check_body(json.dumps({"input": "a", "tools": tools}).encode())
    with pytest.raises(InvalidRequestError, match=r"^tools: at most 128 .*: describe fewer"):
        check_body(json.dumps({"input": "a", "tools": [*tools, functions[0]]}).encode())


@pytest.mark.attack("Z25")
def test_many_short_choices_are_refused() -> None:
    """Beside a tool, vLLM's server made an object, and JSON, of each of half a million on the hub's loop."""
    tool = {"type": "function", "function": {"name": "a", "strict": True, "parameters": {"type": "object"}}}
    asked = {"messages": [], "tools": [tool], "structured_outputs": {"choice": ["a"] * 1024}}
    check_body(json.dumps(asked).encode())
    asked["structured_outputs"] = {"choice": [""] * 500_000}
    with pytest.raises(InvalidRequestError, match="500000 choices, where 1024 are allowed"):
        check_body(json.dumps(asked).encode())


@pytest.mark.attack("O2")
@pytest.mark.parametrize(("size_bytes", "is_aside"), [(100, False), (100_000, True)])
def test_a_large_body_is_checked_beside_the_loop(size_bytes: int, is_aside: bool) -> None:
    seen: list[threading.Thread] = []

    def check(_: bytes) -> None:
        seen.append(threading.current_thread())
        raise InvalidRequestError("no")

    with pytest.raises(InvalidRequestError, match="no"):
        asyncio.run(checked_aside(check, b"{" * size_bytes, SCOPE))
    assert [each is not threading.current_thread() for each in seen] == [is_aside]


@pytest.mark.attack("T3")
@pytest.mark.parametrize("name", ["structured_outputs", "response_format", "text", "output_config", "tools"])
def test_a_small_body_with_forms_is_checked_as_a_large_one(name: str) -> None:
    """15 KiB of empty lists took the hub's loop as long as megabytes of text."""
    form = [[]] * 1000
    asked = json.dumps({"messages": [], name: form}).encode()
    assert counted_bytes(asked) == 16 << 10
    escaped = asked.replace(name[:1].encode(), b"\\u%04x" % ord(name[0]), 1)
    assert json.loads(escaped) == json.loads(asked)
    assert counted_bytes(escaped) == 16 << 10
    assert counted_bytes(json.dumps({"messages": [], name: [[]] * 100}).encode()) < 1 << 10
    assert counted_bytes(json.dumps({"messages": [], "user": "x" * 9000}).encode()) < 16 << 10


@pytest.mark.attack("P20")
def test_objects_are_counted_beside_tools_and_forms() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": [{}] * 40}}}] * 100
    body = {"tools": tools, "messages": [{"role": "user", "content": "a"}] * MAX_OBJECTS}
    check_body(json.dumps(body).encode())
    for name in ("messages", "input", "anything"):
        with pytest.raises(InvalidRequestError, match="more than 4096 objects"):
            check_body(json.dumps({**body, name: [{}] * (MAX_OBJECTS + 1)}).encode())


@pytest.mark.attack("Z29")
def test_items_are_fewer_than_messages() -> None:
    """The server tries some thirty kinds for each: 4000 messages of 50 bytes took the hub's loop more than a second."""
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"path": "{}"}'}
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "so {"}]}
    result = {"type": "function_call_output", "call_id": "a", "output": "{" * 100}
    session = json.dumps({"input": [thought, call, result] * 512}).encode()
    check_body(session, reads_items=True)
    items = json.dumps({"input": [{"type": "message", "role": "user", "content": "a"}] * 2049}).encode()
    check_body(items)
    with pytest.raises(InvalidRequestError, match=r"^input: more than 2048 objects.*: send fewer"):
        check_body(items, reads_items=True)


@pytest.mark.attack("Z29")
@pytest.mark.parametrize(
    "field",
    [
        {"stop_token_ids": list(range(500_000))},
        {"stop": ["a"] * 500_000},
        {"vllm_xargs": {"a": [1.5] * 500_000}},
        {"logit_bias": {str(each): 1 for each in range(65_000)}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_what_a_stage_takes_few_of_is_refused_before_it_is_read(field: dict[str, Any]) -> None:
    """The server read them on the hub's loop, for half a second and more, and the stage refused them then."""
    (name,) = field
    with pytest.raises(InvalidRequestError, match=rf"^{name}: more than 4096 values: give fewer"):
        check_body(json.dumps({"prompt": "a", **field}).encode())
    text = ",".join("many of them, in a text" for _ in range(5000))
    check_body(json.dumps({"prompt": [1] * 10_000, "allowed_token_ids": [1] * 10_000, name: [text] * 256}).encode())


@pytest.mark.attack("P23")
@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"model": "m"}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\xff"}',
        b"[]",
        b"7",
        b"\x0b{}",
        b"a=b",
    ],
)
def test_what_the_server_might_read_otherwise_is_refused(body: bytes) -> None:
    """Behind a byte order mark the server read JSON whose forms and tools nothing had checked."""
    with pytest.raises(InvalidRequestError, match="JSON"):
        check_body(body)


@pytest.mark.parametrize("body", [b"", b" \n", b" {}", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n--x--'])
def test_an_object_a_form_or_nothing_is_a_body(body: bytes) -> None:
    check_body(body)


@pytest.mark.attack("Q5")
def test_a_batch_has_some_conversations_and_a_chat_any_number_of_messages() -> None:
    """Four thousand were rendered one after the other, for 2 ms of the hub's loop each."""
    message = {"role": "user", "content": [{"type": "text", "text": "[["}]}
    check_body(json.dumps({"messages": [[message]] * MAX_CONVERSATIONS}).encode())
    check_body(json.dumps({"messages": [message] * (MAX_CONVERSATIONS + 1)}).encode())
    check_body(b'{"messages": "[["}')
    for indent in (None, 1):
        body = json.dumps({"messages": [[message]] * (MAX_CONVERSATIONS + 1)}, indent=indent).encode()
        with pytest.raises(InvalidRequestError, match=f"one request may have {MAX_CONVERSATIONS} conversations"):
            check_body(body)


@pytest.mark.attack("R40")
@pytest.mark.parametrize("field", ["chat_template_kwargs", "mm_processor_kwargs"])
def test_arguments_of_a_template_have_few_names(field: str) -> None:
    """Each is looked up in the one thread that renders all chats: 500 000 kept the others waiting for 5 s."""
    names = {f"{number:x}": 1 for number in range(MAX_NAMES)}
    for value in (names, "{", None, ["{"], {}):
        check_body(json.dumps({"messages": [], field: value}).encode())
    with pytest.raises(InvalidRequestError, match=f"^{field}: at most {MAX_NAMES} names"):
        check_body(json.dumps({"messages": [], field: {**names, "one more": {}}}, indent=1).encode())


def test_a_length_penalty_by_which_no_beam_could_be_compared_is_refused() -> None:
    """It made the server divide by zero, and answer 500."""
    for penalty in (1, -10.0, 10, None, "1.5", True, "a", [1e308]):
        check_body(json.dumps({"use_beam_search": True, "length_penalty": penalty}).encode())
    for penalty in (-1e308, 10.5, "nan", "-inf", "-1e308", 10**400):
        with pytest.raises(InvalidRequestError, match=r"^length_penalty: it has to be between -10 and 10"):
            check_body(json.dumps({"use_beam_search": True, "length_penalty": penalty}).encode())


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_body_waits_for_its_turn_before_the_server_reads_it(
    monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """vLLM's server decodes it on the loop as soon as its last piece has come."""
    whole = json.dumps({"messages": []}).encode()
    pieces = [
        {"type": "http.request", "body": whole[:5], "more_body": True},
        {"type": "http.request", "body": whole[5:]},
    ]
    turns: list[int] = []

    async def long_body(_scope: Any, size_bytes: int, _memory_bytes: int) -> None:
        turns.append(size_bytes)
        if is_full:
            raise OverloadedError("too many", 1.0)

    async def receive() -> dict[str, Any]:
        return pieces.pop(0)

    monkeypatch.setattr(body, "long_body", long_body)
    read = body.Body({"type": "http", "headers": []}, receive)
    await read.receive()
    assert turns == []
    if is_full:
        with pytest.raises(HTTPException):
            await read.receive()
        assert isinstance(read.refusal, OverloadedError)
    else:
        assert (await read.receive())["body"] == whole[5:]
    assert turns == [len(whole)]


@pytest.mark.parametrize(
    ("prompts", "answers"),
    [
        ({"prompt": [[5]] * 1000}, 1000),
        ({"prompt": ["a"] * 500, "n": 2}, 1000),
        ({"prompt": "a", "n": "1000"}, 1000),
        ({"prompt": "a", "n": "1_000"}, 1000),
        ({"token_ids": [5], "sampling_params": {"n": 1000}}, 1000),
        ({"prompt": [5, 6], "n": 1000.0}, 1000),
        ({"messages": [[{"role": "user", "content": "a"}]] * 250, "n": 4}, 1000),
    ],
)
@pytest.mark.attack("S5")
def test_what_is_asked_beside_the_prompts_counts_for_each_answer(prompts: dict[str, Any], answers: int) -> None:
    """The server read 500 000 tokens to stop at anew for each of 1000 prompts, in one turn of the hub's loop."""
    most = MAX_REPEATED_BYTES // answers
    check_body(json.dumps({**prompts, "stop": "a" * (most - 20)}).encode())
    with pytest.raises(InvalidRequestError, match=f"bytes, which count for each of {answers} answers"):
        check_body(json.dumps({**prompts, "stop": "a" * most}).encode())
    check_body(json.dumps({**prompts, "n": None, "stop": "a"}).encode())


@pytest.mark.attack("S5")
def test_a_number_may_be_written_with_escapes() -> None:
    long = json.dumps({"prompt": "a", "stop": "a" * (MAX_REPEATED_BYTES // 1000)})
    check_body(long.encode())
    with pytest.raises(InvalidRequestError, match="for each of 1000 answers"):
        check_body((long[:-1] + ', "n": "\\u00310\\u00300"}').encode())


@pytest.mark.attack("Z49")
@pytest.mark.parametrize("text", ["", "a", [5]], ids=str)
@pytest.mark.parametrize("name", ["input", "prompt", "documents", "text_2", "queries", "items", "data_1", "texts"])
def test_a_request_has_so_many_texts_however_short(name: str, text: Any) -> None:
    """Five million empty ones are 15 MB, and a tokenizer begins with each."""
    assert check_body(json.dumps({name: [text] * 16_384}).encode()).texts == 16_384
    with pytest.raises(InvalidRequestError, match="may have 16384 texts or prompts, not 16385"):
        check_body(json.dumps({name: [text] * 16_385}).encode())


@pytest.mark.attack("Z49")
async def test_texts_that_are_padded_have_a_bound_of_tokens() -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    for texts, said in ((128, ""), (129, "may have 128 texts that are padded")):
        body = Body({"type": "http", "headers": []}, receive, 32_768)
        with pytest.raises(InvalidRequestError, match=said) if said else nullcontext():
            body.check(json.dumps({"input": ["a"] * texts, "padding": "max_length"}).encode())


@pytest.mark.attack("Z78")
def test_few_prompts_are_rendered_at_once() -> None:
    """The server makes a request of each, in one turn of the hub's loop."""

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    asked = json.dumps({"prompt": [[5]] * 17}).encode()
    Body({"type": "http", "headers": [], "path": "/v1/completions"}, receive).check(asked)
    with pytest.raises(InvalidRequestError, match="may have 16 prompts rendered"):
        Body({"type": "http", "headers": [], "path": "/v1/completions/render"}, receive).check(asked)


@pytest.mark.attack("Z29")
def test_values_of_nested_parameters_are_few() -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids: more than 4096 values"):
        check_body(json.dumps({"token_ids": [5], "sampling_params": {"stop_token_ids": [1] * 5000}}).encode())


def test_a_long_prompt_does_not_count_for_each_answer() -> None:
    check_body(json.dumps({"prompt": "a" * 4_000_000, "n": 1000}).encode())
    check_body(json.dumps({"messages": [{"role": "user", "content": "a" * 4_000_000}], "n": 1000}).encode())


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"prompt": "a"}, Asked()),
        ({"prompt": ["a", "b"], "echo": True}, Asked(prompts=2, shows_prompts=True, texts=2)),
        ({"prompt": [[5], [6], [7]], "return_token_ids": "yes"}, Asked(prompts=3, shows_prompts=True, texts=3)),
        ({"prompt": [5, 6], "echo": False, "return_token_ids": None, "tools": [{}]}, Asked(has_tools=True)),
        ({"prompt": [], "messages": [[], []]}, Asked(prompts=2)),
        ({"input": ["", "b", "c"], "padding": "do_not_pad"}, Asked(texts=3)),
        ({"text_1": "a", "documents": [{"content": []}] * 4, "padding": "max_length"}, Asked(texts=4, is_padded=True)),
    ],
)
def test_what_bounds_of_answers_need_is_read_off_the_body(given: dict[str, Any], asked: Asked) -> None:
    assert check_body(json.dumps(given).encode()) == asked


@pytest.mark.parametrize("field", ["features", "content_parts"])
@pytest.mark.attack("S7")
def test_what_the_server_would_unpack_for_no_stage_is_refused(field: str) -> None:
    """Pictures there passed by the bound of pixels; tensors were read in the hub's loop, of whatever number."""
    check_body(json.dumps({"token_ids": [5], field: None}).encode())
    with pytest.raises(InvalidRequestError, match=f"^{field}: no stage takes it"):
        check_body(json.dumps({"token_ids": [5], field: [{"type": "image_url", "url": "data:,"}]}).encode())


@pytest.mark.attack("Y7")
@pytest.mark.parametrize(
    ("field", "reads_items"),
    [("messages", False), ("system", False), ("messages", True), ("input", True)],
)
def test_values_in_messages_are_few(field: str, reads_items: bool) -> None:
    """Each text in a list is tried as fifteen kinds of parts: half a million of them held the loop for 5 s."""
    many = [{"role": "user", "content": ["a"] * (MAX_MESSAGE_VALUES + 2)}]
    with pytest.raises(InvalidRequestError, match=f"the messages have more than {MAX_MESSAGE_VALUES} values"):
        check_body(json.dumps({field: many}).encode(), reads_items=reads_items)
    check_body(json.dumps({field: [{"role": "user", "content": "a, " * MAX_MESSAGE_VALUES}] * 4}).encode())


def test_token_ids_and_texts_of_an_embedding_are_no_messages() -> None:
    for many in (list(range(100_000)), ["a"] * 16_000):
        check_body(json.dumps({"input": many}).encode())


@pytest.mark.attack("Y7")
def test_a_route_of_items_has_its_input_counted() -> None:
    whole = json.dumps({"input": [1] * 100_000}).encode()
    for path, is_refused in (("/v1/responses", True), ("/v1/embeddings", False)):
        asked = Body({**SCOPE, "path": path, "headers": []}, receive=_nothing)
        if is_refused:
            with pytest.raises(InvalidRequestError, match="values"):
                asked.check(whole)
        else:
            asked.check(whole)


async def _nothing() -> Any:
    raise AssertionError


@pytest.mark.attack("Y5")
def test_arguments_in_a_body_are_counted_also_under_an_escaped_name() -> None:
    text = json.dumps("[" + "[]," * MAX_CONTAINERS + "[]]")
    for name in ('"arguments"', '"\\u0061rguments"'):
        call = f'{{"messages":[{{"role":"assistant","tool_calls":[{{"function":{{{name}:{text}}}}}]}}]}}'
        with pytest.raises(InvalidRequestError, match="the arguments of earlier calls"):
            check_body(call.encode())
