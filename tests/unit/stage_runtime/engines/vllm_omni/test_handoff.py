"""Hand-offs of vllm-omni stages are checked before they reach the engine, which would die of a bad one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.vllm_omni.handoff import (
    Codes,
    code_count,
    codes_of,
    is_terminal,
    pieces_of,
    read_payload,
    read_source,
    renamed,
)

torch = pytest.importorskip("torch")
CODES = Codes(groups=4, codes=2048)


def test_a_good_payload_is_taken_as_tensor_or_list() -> None:
    for codes in (torch.arange(8), list(range(8)), []):
        assert read_payload({"payload": {"codes": {"audio": codes}}}, CODES)["codes"]["audio"] is codes
    assert read_payload({"payload": {"speaker": "ethan"}}, CODES) == {"speaker": "ethan"}
    assert read_payload({"payload": {"embed": {}}}, None) == {"embed": {}}


def of_codes(frames: int = 2, **meta: Any) -> dict[str, Any]:
    return {"payload": {"codes": {"audio": torch.arange(4 * frames)}, "meta": meta, "language": ["english"]}}


def test_what_a_payload_says_of_itself_is_taken_where_it_fits() -> None:
    no, yes = torch.tensor(False), torch.tensor([True])
    told: dict[str, Any] = {"finished": no, "is_segment_finished": no, "request_id": "r0", "left_context_size": 0}
    read_payload(of_codes(**told), CODES)
    reference: dict[str, Any] = {"ref_context_size": 2, "ref_context_request_id": "r0", "ref_context_included": True}
    read_payload(of_codes(3, **told, **reference), CODES)
    read_payload(of_codes(finished=yes, is_segment_finished=yes), CODES, is_first=False)
    read_payload(of_codes(0, finished=yes, left_context_size=0), CODES, is_first=False)
    assert code_count(of_codes(3)["payload"]) == 12
    assert (code_count({"codes": {"audio": [1, 2]}}), code_count({"codes": {}}), code_count({})) == (2, 0, 0)


@pytest.mark.attack("R2")
@pytest.mark.parametrize(
    "meta",
    [
        {"left_context_size": 3},
        {"left_context_size": 1 << 40},
        {"left_context_size": -1},
        {"left_context_size": "x"},
        {"left_context_size": []},
        {"ref_context_size": 2, "ref_context_request_id": "x"},
        {"ref_context_size": 3, "ref_context_included": True},
        {"ref_context_request_id": {"a": 1}},
        {"request_id": {"a": 1}},
        {"request_id": "x" * 2000},
        {"is_segment_finished": []},
        {"finished": torch.ones(2)},
        {"finished": "yes"},
        {"replace_runtime_additional_information": True},
        {5: 5},
    ],
)
def test_what_a_payload_says_of_itself_is_refused_where_it_does_not(meta: dict[Any, Any]) -> None:
    handed = of_codes()
    handed["payload"]["meta"] = meta
    with pytest.raises(InvalidRequestError, match="the hand-off's meta"):
        read_payload(handed, CODES)


@pytest.mark.attack("Z70")
@pytest.mark.parametrize(
    "meta",
    [
        {"ref_context_size": 2, "ref_context_request_id": "x", "ref_context_included": True},
        {"is_segment_finished": True},
        {"is_segment_finished": torch.tensor(True), "finished": torch.tensor(False)},
    ],
)
def test_a_first_piece_is_more_than_its_reference_and_no_end_comes_before_the_last(meta: dict[str, Any]) -> None:
    """Either ended the decoder in its step, with every other request."""
    with pytest.raises(InvalidRequestError, match="the hand-off's meta"):
        read_payload(of_codes(2, **meta), CODES)


@pytest.mark.attack("R2")
def test_a_reference_comes_in_the_first_piece_alone() -> None:
    with pytest.raises(InvalidRequestError, match="the first piece has to begin with these"):
        read_payload(of_codes(ref_context_size=1, ref_context_included=True), CODES, is_first=False)


@pytest.mark.parametrize(
    ("handed", "said"),
    [
        ({}, "no payload"),
        ({"payload": {}}, "no payload"),
        ({"payload": {"codes": {"audio": torch.arange(7)}}}, "7 codes can't be shared out to 4 books"),
        ({"payload": {"codes": {"audio": [0, 1, 2, 2048]}}}, "out of its book of 2048"),
        ({"payload": {"codes": {"audio": [0, 1, 2, -1]}}}, "out of its book of 2048"),
        ({"payload": {"codes": {"audio": torch.ones(4)}}}, "whole numbers"),
        ({"payload": {"codes": {"audio": "abcd"}}}, "whole numbers"),
        ({"payload": {"codes": {"audio": torch.ones((2, 2), dtype=torch.int64)}}}, "in one row"),
        ({"payload": {"codes": {"ref": torch.arange(4)}}}, "none that the stage before makes"),
        ({"payload": {"embed": {}}}, "none that the stage before makes"),
        ({"payload": {"codes": [1]}}, "none that the stage before makes"),
        ({"payload": {"speaker": [1]}}, "speaker is a short text"),
        ({"payload": {"language": ["a", "b"]}}, "language is a short text"),
        ({"payload": {"speaker": "x", "meta": 5}}, "meta is no mapping"),
    ],
)
def test_a_bad_payload_is_refused(handed: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read_payload(handed, CODES)


def test_the_source_is_what_the_stage_before_was_asked_and_made() -> None:
    handed = {"source": {"prompt_token_ids": [1, 1], "token_ids": [5], "additional_information": {"text": ["a"]}}}
    source = read_source(handed)
    assert source.prompt() == {"prompt_token_ids": [1, 1], "additional_information": {"text": ["a"]}}
    made = source.as_output("r1")
    assert (made.finished, made.request_id, made.outputs[0].cumulative_token_ids) == (True, "r1", [5])
    for bad in ({}, {"source": {"prompt_token_ids": []}}, {"source": {"prompt_token_ids": [-1]}}, {"source": 1}):
        with pytest.raises(InvalidRequestError, match="the hand-off's source"):
            read_source(bad)


def test_the_last_piece_says_so_itself() -> None:
    assert is_terminal({"meta": {"finished": torch.tensor(True)}})
    assert is_terminal({"meta": {"finished": True}})
    for other in ({"meta": {"finished": torch.tensor(False)}}, {"meta": {}}, {}, {"meta": {"finished": "yes"}}):
        assert not is_terminal(other)


def test_a_payload_gets_the_name_that_its_request_has_here() -> None:
    payload = {"codes": {}, "meta": {"request_id": "r0", "finished": True}}
    assert renamed(payload, "r7") == {"codes": {}, "meta": {"request_id": "r7", "finished": True}}
    assert payload["meta"]["request_id"] == "r0"
    assert renamed({"codes": {}}, "r7") == {"codes": {}}


def test_pieces_are_a_list_of_mappings_or_the_hand_off_itself() -> None:
    whole = {"payload": {}}
    assert pieces_of(whole) == [whole]
    assert pieces_of({"pieces": [whole, whole]}) == [whole, whole]
    for bad in ({"pieces": []}, {"pieces": [1]}, {"pieces": "x"}):
        with pytest.raises(InvalidRequestError):
            pieces_of(bad)


def test_codes_are_known_of_a_decoder_whose_model_tells_them() -> None:
    talker = SimpleNamespace(num_code_groups=16, code_predictor_config=SimpleNamespace(vocab_size=2048))
    config = SimpleNamespace(talker_config=talker)
    assert codes_of("code2wav", config) == Codes(groups=16, codes=2048)
    assert codes_of("qwen3_tts", config) is None
    # Qwen2.5-Omni's codes are one row.
    drawn = SimpleNamespace(token2wav_config=SimpleNamespace(dit_config=SimpleNamespace(num_embeds=8193)))
    assert codes_of("code2wav", drawn) == Codes(groups=1, codes=8194)
    assert codes_of("code2wav", SimpleNamespace()) is None


@pytest.mark.attack("Z36")
def test_codes_without_end_are_refused_before_any_is_looked_at() -> None:
    endless = torch.ones(1, dtype=torch.int8).expand(1 << 34)
    with pytest.raises(InvalidRequestError, match="codes are 17179869184 numbers; at most 524288 are taken"):
        CODES.check({"codes": {"audio": endless}}, is_first=True)


@pytest.mark.attack("Z58")
@pytest.mark.parametrize("codes", [list(range(12)), torch.arange(12)])
def test_no_more_codes_are_looked_at_than_the_decoder_takes(codes: Any) -> None:
    decoder = Codes(groups=4, codes=2048, most=8)
    read_payload({"payload": {"codes": {"audio": codes[:8]}}}, decoder)
    with pytest.raises(InvalidRequestError, match="codes are 12 numbers; at most 8 are taken"):
        read_payload({"payload": {"codes": {"audio": codes}}}, decoder)
