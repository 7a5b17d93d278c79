"""The fields of a request's state, which users of vLLM-Omni know: each name, type and default."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from hub.orchestrator.orchestrator import OrchestratorRequestState, StreamingInputState
from hub.request.plan import StageGraph
from hub.request.state import RequestState
from omni_discovery.deploy.document import parse_deploy
from tests.support.request_walk import PAIR, Walk

_REQUIRED = object()
#: Name, type as it is written, what an object built without it has.
STATE: tuple[tuple[str, object, object], ...] = (
    ("request_id", str, _REQUIRED),
    ("prompt", Any, None),
    ("sampling_params_list", list[Any], []),
    ("final_stage_id", int, -1),
    ("final_output_stage_ids", set[int], set()),
    ("finished_final_output_stage_ids", set[int], set()),
    ("request_timestamp", float, 0.0),
    ("stage_submit_ts", dict[int, float], {}),
    ("pipeline_timings", dict[str, float], {}),
    ("mm_features", list[Any] | None, None),
    ("mm_processor_kwargs", dict[str, Any] | None, None),
    ("pd_prefill_multimodal_output", dict[str, Any] | None, None),
    ("streaming", StreamingInputState, StreamingInputState()),
)
STREAMING: tuple[tuple[str, object, object], ...] = (
    ("enabled", bool, False),
    ("segment_finished", bool, False),
    ("new_prompt_len_snapshot", int | None, None),
    ("bridge_states", dict[str, Any], {}),
)


def table_of(kind: type[Any]) -> list[tuple[str, object, object]]:
    types = typing.get_type_hints(kind)
    return [(field.name, types[field.name], _default(field)) for field in dataclasses.fields(kind)]


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return _REQUIRED if field.default is dataclasses.MISSING else field.default


def test_the_state_of_a_request_has_every_field_that_users_know() -> None:
    found = {name: (kind, default) for name, kind, default in table_of(OrchestratorRequestState)}
    for name, kind, default in STATE:
        assert found[name] == (kind, default), name


def test_streaming_input_has_every_field_that_users_know() -> None:
    found = {name: (kind, default) for name, kind, default in table_of(StreamingInputState)}
    for name, kind, default in STREAMING:
        assert found[name] == (kind, default), name


def test_two_requests_share_nothing() -> None:
    first, second = OrchestratorRequestState("a"), OrchestratorRequestState("b")
    for name, _, default in STATE:
        if isinstance(default, list | dict | set | StreamingInputState):
            assert getattr(first, name) is not getattr(second, name), name


def test_what_a_prompt_says_of_pictures_and_sounds_is_in_the_state() -> None:
    graph = StageGraph(parse_deploy(PAIR, "test.yaml"))
    inputs = {"prompt_token_ids": [1], "mm_features": ["a picture"], "mm_processor_kwargs": {"fps": 2}}
    state = RequestState("r1", inputs, graph.plan(), graph.merge_params(None)).public
    assert (state.mm_features, state.mm_processor_kwargs) == (["a picture"], {"fps": 2})


def test_a_request_fills_in_what_is_known_of_it() -> None:
    state = Walk().machine.state.public
    assert (state.request_id, state.prompt, state.final_stage_id) == ("r1", {"prompt": "hi"}, 1)
    assert (state.final_output_stage_ids, state.finished_final_output_stage_ids) == ({0, 1}, set())
    assert state.sampling_params_list == [{"seed": 1}, {}]
