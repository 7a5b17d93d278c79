"""The stage graph: which stages a request needs, and what each is told."""

from __future__ import annotations

import pytest

from hub.request.plan import StageGraph
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import InvalidRequestError

#: The thinker writes; painter and talker both take its hand-off; the vocoder takes the talker's.
BRANCHING = """
stages:
  - {stage_id: 0, engine: echo, final_output: text, default_sampling_params: {temperature: 0.0, max_tokens: 64}}
  - {stage_id: 1, engine: echo, input_from: [0], final_output: image}
  - {stage_id: 2, engine: echo, input_from: [0]}
  - {stage_id: 3, engine: echo, input_from: [2], final_output: audio}
"""


def graph_of(text: str) -> StageGraph:
    return StageGraph(parse_deploy(text, "test.yaml"))


def test_without_a_wish_every_output_is_planned() -> None:
    plan = graph_of(BRANCHING).plan()
    assert plan.stages == (0, 1, 2, 3)
    assert plan.finals == {0: "text", 1: "image", 3: "audio"}
    assert plan.next_stages == {0: (1, 2), 1: (), 2: (3,), 3: ()}
    assert plan.inputs == {0: (), 1: (0,), 2: (0,), 3: (2,)}


def test_a_picture_needs_the_thinker_but_does_not_show_its_text() -> None:
    plan = graph_of(BRANCHING).plan(["image"])
    assert plan.stages == (0, 1)
    assert plan.finals == {1: "image"}
    assert plan.next_stages == {0: (1,), 1: ()}


def test_text_alone_leaves_out_all_later_stages_and_wants_no_handoff() -> None:
    plan = graph_of(BRANCHING).plan(("text",))
    assert plan.stages == (0,)
    assert plan.next_stages == {0: ()}


@pytest.mark.parametrize("modalities", [["video"], ["text", "smell"], []])
def test_an_unknown_modality_is_refused_with_what_there_is(modalities: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="text, image, audio"):
        graph_of(BRANCHING).plan(modalities)


def test_the_stage_before_is_the_input_where_the_document_names_none() -> None:
    graph = graph_of("stages: [{stage_id: 5, engine: echo}, {stage_id: 2, engine: echo, final_output: text}]")
    assert graph.inputs_of(2) == (5,)
    assert graph.next_of(5) == (2,)
    assert graph.plan().stages == (5, 2)


def test_a_stage_of_two_inputs_is_next_of_both() -> None:
    graph = graph_of(
        "stages: [{stage_id: 0, engine: e}, {stage_id: 1, engine: e, input_from: []},"
        " {stage_id: 2, engine: e, input_from: [0, 1], final_output: text}]"
    )
    assert graph.next_of(0) == graph.next_of(1) == (2,)
    assert graph.plan().inputs[2] == (0, 1)


def test_the_request_overrules_the_documents_parameters_stage_by_stage() -> None:
    merged = graph_of(BRANCHING).merge_params({0: {"max_tokens": 5}, 1: {"steps": 4}})
    assert merged[0] == {"temperature": 0.0, "max_tokens": 5}
    assert merged[1] == {"steps": 4}
    assert merged[2] == merged[3] == {}


def test_a_list_of_parameters_may_end_early_as_over_http() -> None:
    graph = graph_of(BRANCHING)
    assert graph.params_of(None, []) == {}
    assert graph.params_of(None, [{"seed": 1}]) == {0: {"seed": 1}}
    assert graph.params_of(None, [{"seed": 1}, None, {"seed": 2}]) == {0: {"seed": 1}, 2: {"seed": 2}}
    with pytest.raises(InvalidRequestError, match="has 5 entries; the pipeline has 4 stages"):
        graph.params_of(None, [{}] * 5)


def test_parameters_for_a_stage_that_is_not_there_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stage 9"):
        graph_of(BRANCHING).merge_params({9: {}})


def test_merging_does_not_touch_the_document() -> None:
    graph = graph_of(BRANCHING)
    graph.merge_params({0: {"max_tokens": 5}})
    assert graph.merge_params(None)[0] == {"temperature": 0.0, "max_tokens": 64}


def test_pieces_travel_on_the_edges_that_the_request_needs_and_the_document_allows() -> None:
    text = (
        BRANCHING + "async_chunk: true\nedges: [{from: 0, to: 2, window_size: 4}, {from: 2, to: 3, async_chunk: false}]"
    )
    graph = graph_of(text)
    assert graph.plan().windows == {(0, 1): 16, (0, 2): 4}
    assert graph.plan().pieces_to(0) == (1, 2)
    assert graph.plan(["image"]).windows == {(0, 1): 16}
    assert graph.plan(async_chunk=False).windows == {}
    assert graph_of(BRANCHING).plan().windows == {}
    assert graph_of(BRANCHING).plan(async_chunk=True).windows.keys() == {(0, 1), (0, 2), (2, 3)}


@pytest.mark.attack("Z45")
def test_of_many_diamonds_joined_by_pieces_each_stage_is_looked_at_once() -> None:
    """Thirty layers of two stages, each fed by both of the layer before: a billion paths."""
    stages = ["{stage_id: 0, engine: echo}"]
    before = [0]
    for layer in range(30):
        now = [2 * layer + 1, 2 * layer + 2]
        stages += [f"{{stage_id: {each}, engine: echo, input_from: {before}, async_chunk: true}}" for each in now]
        before = now
    stages.append(f"{{stage_id: 99, engine: echo, input_from: {before}, final_output: text}}")
    text = "stages: [" + ", ".join(stages) + "]"
    edges = [f"{{from: {a}, to: {b}, async_chunk: true}}" for a, b in _PAIRS]
    plan = graph_of(text.replace(", async_chunk: true", "") + "\nedges: [" + ", ".join(edges) + "]").plan()
    assert not plan.keeps_pace(0)
    assert plan.keeps_pace(99)


_PAIRS = [(0, 1), (0, 2), *((a, b) for low in range(1, 59, 2) for a in (low, low + 1) for b in (low + 2, low + 3))]
