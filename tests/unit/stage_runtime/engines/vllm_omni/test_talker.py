"""What a talker takes of its thinker: chats that it can find its way in, and hidden states of its size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.vllm_omni.talker import Talker, Turns, talker_of

BEGIN, SYSTEM, USER, ASSISTANT, WORD = 100, 1, 2, 3, 50
TURNS = Turns(begin=BEGIN, roles=(SYSTEM, USER, ASSISTANT), assistant=ASSISTANT)
CHAT = [BEGIN, SYSTEM, WORD, BEGIN, USER, WORD, BEGIN, ASSISTANT, WORD]
OF_3 = Talker(hidden_size=8, vocabulary=200, turns=TURNS, voices=("ethan", "Chelsie"), most=1024)
OF_2_5 = Talker(hidden_size=8, vocabulary=200, voices=("Chelsie",), most=1024)


def test_a_chat_ends_with_the_assistants_turn() -> None:
    for chat in (CHAT, CHAT[3:], [*CHAT, WORD, WORD], [BEGIN, ASSISTANT, WORD, *CHAT]):
        TURNS.check(chat)


@pytest.mark.parametrize(
    "token_ids",
    [
        [],
        [WORD],
        CHAT[6:],
        CHAT[:6],
        CHAT[:8],
        [*CHAT, BEGIN],
        [BEGIN, WORD, *CHAT],
        [*CHAT[:6], BEGIN, WORD, WORD],
    ],
)
def test_what_a_talker_would_die_of_is_no_chat(token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="speaks the answers of chats alone"):
        OF_3.check_prompt(token_ids)
    OF_2_5.check_prompt(token_ids)


def test_voices_are_found_whatever_their_case() -> None:
    assert (OF_3.voice(" Ethan"), OF_3.voice("CHELSIE"), OF_2_5.voice("chelsie")) == ("ethan", "Chelsie", "Chelsie")
    for strange in ("nobody", "", None, 7):
        with pytest.raises(InvalidRequestError, match="speaker: this model has ethan, Chelsie"):
            OF_3.voice(strange)


def of_2_5(**more: Any) -> dict[str, Any]:
    rows = torch.zeros(3, 8)
    return {
        "embed": {"prefill": rows},
        "hidden_states": {"output": torch.zeros(2, 8)},
        "ids": {"prompt": [5, 6, 7], "output": [8, 9]},
        **more,
    }


def of_3(**more: Any) -> dict[str, Any]:
    rows = torch.zeros(len(CHAT) + 1, 8, dtype=torch.bfloat16)
    one = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    return {
        "embed": {"prefill": rows, "tts_bos": one, "tts_eos": one, "tts_pad": one},
        "hidden_states": {"output": rows},
        "ids": {"prompt": CHAT, "all": [*CHAT, WORD]},
        **more,
    }


def test_hidden_states_that_fit_are_taken() -> None:
    OF_2_5.check(of_2_5(), is_first=True)
    OF_3.check(of_3(), is_first=True)
    OF_3.check(of_3(embed={**of_3()["embed"], "tts_pad": torch.zeros(12, 1, 8)}), is_first=True)
    OF_3.check({"embed": {"decode": torch.zeros(1, 8)}}, is_first=False)
    # The last piece may say no more than that.
    OF_3.check({"meta": {"finished": True}}, is_first=False)


@pytest.mark.parametrize(
    ("talker", "payload"),
    [
        (OF_2_5, {"meta": {}}),
        (OF_2_5, of_2_5(embed={"prefill": torch.zeros(3, 7)})),
        (OF_2_5, of_2_5(embed={"prefill": torch.zeros(4, 8)})),
        (OF_2_5, of_2_5(embed={"prefill": [[0.0] * 8] * 3})),
        (OF_2_5, of_2_5(embed={"prefill": torch.zeros(3, 8, dtype=torch.int64)})),
        (OF_2_5, of_2_5(hidden_states={"output": torch.zeros(0, 8)})),
        (OF_2_5, of_2_5(ids={"prompt": [5, 6, 7], "output": []})),
        (OF_2_5, of_2_5(ids={"prompt": [5, 6, -7], "output": [8]})),
        (OF_2_5, of_2_5(ids={"prompt": "abc", "output": [8]})),
        (OF_3, of_3(hidden_states={"output": torch.zeros(3, 8)})),
        (OF_3, of_3(ids={"prompt": CHAT, "all": []})),
        (OF_3, of_3(ids={"prompt": [WORD], "all": [WORD]})),
        (OF_3, of_3(embed={"prefill": torch.zeros(20, 8)})),
        (OF_3, of_3(embed={**of_3()["embed"], "prefill": torch.zeros(20, 3, 8)})),
        (OF_3, of_3(embed={**of_3()["embed"], "tts_bos": torch.zeros(7, 3, 8)})),
        (OF_3, of_3(embed={**of_3()["embed"], "cached_decode": torch.zeros(1, 8)})),
        (OF_3, of_3(ids={"prompt": CHAT, "all": [*CHAT, 200]})),
        (OF_3, of_3(ids={"prompt": CHAT, "all": [*CHAT, 1 << 40]})),
        (OF_2_5, of_2_5(ids={"prompt": [5, 6, 7], "output": [200]})),
        (OF_3, of_3(meta={"num_processed_tokens": "x"})),
        (OF_3, of_3(meta={"next_stage_prompt_len": 1 << 40})),
        (OF_3, of_3(hidden_states={"output": torch.zeros(10, 8), "last": torch.zeros(1, 8)})),
        (OF_3, of_3(mtp_inputs=[1])),
        # What talkers died of: one dimension too many, or too few; what only later pieces have; a tensor for a list.
        (OF_3, of_3(embed={**of_3()["embed"], "prefill": torch.zeros(len(CHAT) + 1, 1, 8)})),
        (OF_3, of_3(hidden_states={"output": torch.zeros(len(CHAT) + 1, 1, 8)})),
        (OF_3, of_3(embed={**of_3()["embed"], "tts_bos": torch.zeros(1, 8)})),
        (OF_3, of_3(embed={**of_3()["embed"], "tts_pad": torch.zeros(0, 1, 8)})),
        (OF_3, of_3(embed={**of_3()["embed"], "tts_pad": torch.zeros(5, 8)})),
        (OF_3, of_3(embed={**of_3()["embed"], "tts_eos": None})),
        (OF_3, of_3(embed={**of_3()["embed"], "decode": torch.zeros(3, 9)})),
        (OF_3, of_3(embed={**of_3()["embed"], "decode": "x"})),
        (OF_3, of_3(embed={**of_3()["embed"], "prefill_shape": "x"})),
        (OF_3, of_3(ids={"prompt": CHAT, "all": [*CHAT, WORD], "output": "x"})),
        (OF_2_5, of_2_5(ids={"prompt": torch.tensor([5, 6, 7]), "output": [8]})),
        (OF_2_5, of_2_5(embed={"prefill": torch.zeros(3, 1, 8)})),
        (OF_3, of_3(speaker=[5])),
    ],
)
@pytest.mark.attack("R2", "Z42")
def test_hidden_states_that_do_not_fit_are_refused(talker: Talker, payload: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"the hand-off's|chats alone"):
        talker.check(payload, is_first=True)


def test_a_voice_that_the_talker_lacks_is_refused() -> None:
    OF_3.check(of_3(speaker=["Ethan"], language="en", meta={"finished": torch.tensor(False)}), is_first=True)
    with pytest.raises(InvalidRequestError, match="this model has ethan"):
        OF_3.check(of_3(speaker="nobody"), is_first=True)


def test_a_later_piece_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"embed\.decode"):
        OF_3.check({"embed": {"decode": torch.zeros(1, 7)}}, is_first=False)


def test_a_model_says_what_its_talker_takes() -> None:
    thinker = SimpleNamespace(text_config=SimpleNamespace(hidden_size=8, vocab_size=200, max_position_embeddings=256))
    ids = {"im_start_token_id": BEGIN, "system_token_id": 1, "user_token_id": 2, "assistant_token_id": 3}
    voices = SimpleNamespace(speaker_id={"ethan": 1, "Chelsie": 2})
    assert talker_of("qwen3_omni_moe", SimpleNamespace(thinker_config=thinker, talker_config=voices, **ids)) == OF_3
    assert talker_of("qwen2_5_omni", SimpleNamespace(thinker_config=thinker)) == OF_2_5
    assert talker_of("qwen3_tts", SimpleNamespace()) is None


@pytest.mark.attack("Z36")
def test_ids_without_end_are_refused_before_any_is_looked_at() -> None:
    endless = torch.ones(1, dtype=torch.int8).expand(1 << 34)
    with pytest.raises(InvalidRequestError, match=r"ids\.prompt are 17179869184 numbers"):
        OF_3.check({"ids": {"prompt": endless}}, is_first=True)
    for part, name, shape in (
        ("hidden_states", "output", (1025, 8)),
        ("embed", "decode", (1025, 8)),
        ("embed", "tts_pad", (1025, 1, 8)),
    ):
        with pytest.raises(InvalidRequestError, match=f"{name} are 1025 numbers; at most 1024"):
            OF_3.check({part: {name: torch.full((1, 1), float("nan")).expand(*shape)}}, is_first=False)


@pytest.mark.attack("Z58")
def test_a_chat_of_thousands_of_turns_is_not_spoken() -> None:
    turn = [BEGIN, USER]
    OF_3.check_prompt([*turn * 4095, *CHAT[6:]])
    with pytest.raises(InvalidRequestError, match="chats of up to 4096 messages"):
        OF_3.check_prompt([*turn * 4096, *CHAT[6:]])


@pytest.mark.attack("Z70")
@pytest.mark.parametrize(
    "embed",
    [{"decode": torch.zeros(2, 8)}, {"prefill": torch.zeros(1, 8)}, {"decode": torch.zeros(0, 8)}],
    ids=["two steps", "a prompt", "none"],
)
def test_a_later_piece_is_one_step_of_the_thinker(embed: dict[str, Any]) -> None:
    """Two of them ended the talker in its step, with every other request."""
    with pytest.raises(InvalidRequestError, match="hand-off's embed"):
        OF_3.check({"embed": embed}, is_first=False)


@pytest.mark.attack("Z72")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.full((1, 8), float("nan")), "holds what is no number"),
        (torch.tensor([[0.0] * 7 + [float("inf")]]), "holds what is no number"),
        (torch.full((1, 8), -3e38), "or larger than 1e"),
        (torch.zeros(1, 8, dtype=torch.float64), "must be floats of the shape"),
        (torch.zeros(1, 8).to(torch.float8_e4m3fn), "must be floats of the shape"),
    ],
    ids=["nan", "inf", "large", "double", "byte"],
)
def test_hidden_states_are_numbers_of_a_models_kind(value: torch.Tensor, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        OF_3.check({"embed": {"decode": value}}, is_first=False)
    marks = {**of_3()["embed"], "tts_pad": value.reshape(1, 1, 8)}
    with pytest.raises(InvalidRequestError, match=r"embed\.tts_pad"):
        OF_3.check(of_3(embed=marks), is_first=True)


@pytest.mark.attack("Z70")
def test_hidden_states_come_in_the_models_own_type() -> None:
    """A talker multiplies them by its weights: another type ended it in its step, with every other request."""
    payload = of_3()
    fitted = OF_3.fitted(payload, torch.float16)
    for part in ("embed", "hidden_states"):
        assert {value.dtype for value in fitted[part].values()} == {torch.float16}
    assert fitted["ids"] == payload["ids"]
    assert OF_3.fitted({"meta": {"finished": True}}, torch.bfloat16) == {"meta": {"finished": True}}
    same = OF_3.fitted(payload, payload["embed"]["prefill"].dtype)
    assert same["embed"]["prefill"] is payload["embed"]["prefill"]
    with pytest.raises(InvalidRequestError, match=r"embed\.decode holds what is no number"):
        OF_3.fitted({"embed": {"decode": torch.full((1, 8), 1e6)}}, torch.float16)
