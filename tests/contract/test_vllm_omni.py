"""The engine of vLLM-Omni's stages, with both stages of a tiny Qwen3-TTS in one process.

vLLM-Omni pins other versions than the rest runs on: `make omni-test` makes an environment of its own and runs this
file in it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni has an environment of its own: make omni-test", allow_module_level=True)

from msgspec.structs import replace

from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.config import PayloadError
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest, create_engine
from stage_runtime.supervisor.environment import stage_environment
from stage_runtime.testing import EngineContract
from tests.support.omni_chain import WAIT_S, finish, idle, sound, through_a_connector
from tests.support.omni_models import SPEECH, omni_stages
from tests.support.tiny_qwen3_tts import write_model

pytestmark = [
    pytest.mark.vllm,
    # Of the libraries, about each other.
    pytest.mark.filterwarnings("ignore"),
]
TEXT = "hello world, the quick brown fox"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model") / "tiny-tts"
    with pytest.MonkeyPatch.context() as patch:
        stage = omni_stages(str(folder), async_chunk=True)[0]
        for name, value in {**stage_environment(stage, True), "MASTER_ADDR": "127.0.0.1"}.items():
            patch.setitem(os.environ, name, value)
        write_model(folder)
        yield str(folder)


class Pair:
    """A talker and its decoder, fed by hand."""

    def __init__(self, model: str, *, async_chunk: bool) -> None:
        self.talker, self.decoder = (create_engine(stage) for stage in omni_stages(model, async_chunk=async_chunk))
        for engine in (self.talker, self.decoder):
            engine.load(lambda *_: None)

    def close(self) -> None:
        for engine in (self.talker, self.decoder):
            engine.close()


@pytest.fixture(scope="module")
def whole(model: str) -> Iterator[Pair]:
    pair = Pair(model, async_chunk=False)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def chunked(model: str) -> Iterator[Pair]:
    pair = Pair(model, async_chunk=True)
    yield pair
    pair.close()


def speech(key: str, **params: Any) -> StageRequest:
    return StageRequest(key, key, inputs={"prompt": TEXT}, params={**SPEECH, **params}, next_stages=(1,))


def handoff_of(pair: Pair, request: StageRequest) -> Mapping[str, Any]:
    pair.talker.add(request)
    return through_a_connector(finish(pair.talker, request.key)[request.key][-1].handoff)


def decode(pair: Pair, key: str, handoff: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    pair.decoder.add(StageRequest(key, key, payloads={0: handoff}))
    return sound(finish(pair.decoder, key)[key])


def feed(decoder: Any, key: str, pieces: Sequence[Mapping[str, Any]]) -> None:
    for piece in pieces:
        decoder.feed(key, 0, piece, False)
    decoder.feed(key, 0, None, True)


def test_a_whole_hand_off_becomes_the_same_sound_on_every_attempt(whole: Pair) -> None:
    """1. the talker's codes, with all that the decoder asks of it, travel as plain values
    2. the same request with another key, beside another one and after an abort, makes the same codes and sound
    3. another seed, or another request id without one, makes another sound
    """
    first = handoff_of(whole, speech("a"))
    codes = first["payload"]["codes"]["audio"]
    assert (len(codes) % 4, len(codes) > 0, str(codes.dtype)) == (0, True, "torch.int64")
    heard = decode(whole, "a", first)
    assert len(heard) == len(codes) // 4 * 1920
    assert len(set(heard.tolist())) > 100, "that is silence"

    whole.talker.add(speech("gone"))
    whole.talker.step()
    whole.talker.abort("gone")
    assert finish(whole.talker, "gone")["gone"][-1].finish_reason == "abort"
    for key in ("b", "c"):
        whole.talker.add(replace(speech(key), request_id="another", params={**SPEECH, "seed": 3 if key == "b" else 4}))
    ends = {key: through_a_connector(outputs[-1].handoff) for key, outputs in finish(whole.talker, "b", "c").items()}
    assert ends["b"]["payload"]["codes"]["audio"].tolist() == codes.tolist()
    assert ends["c"]["payload"]["codes"]["audio"].tolist() != codes.tolist()
    assert np.array_equal(decode(whole, "b", ends["b"]), heard)

    without = {name: value for name, value in SPEECH.items() if name != "seed"}
    of_ids = [
        handoff_of(whole, replace(speech(f"{name}{attempt}"), request_id=name, params=without))
        for name, attempt in (("x", 0), ("x", 1), ("y", 0))
    ]
    x0, x1, y = (each["payload"]["codes"]["audio"].tolist() for each in of_ids)
    assert x0 == x1 != y


def test_a_prompt_that_is_computed_in_parts_ends_no_engine_and_says_the_same(whole: Pair) -> None:
    """1. three long texts come at once, more than the talker reads in one step
    2. each is spoken as it is alone: no draw is lost to the parts
    """
    talker: Any = whole.talker
    text = {"prompt": "word " * 250}
    alone = handoff_of(whole, replace(speech("alone"), inputs=text))["payload"]["codes"]["audio"].tolist()
    for key in "abc":
        talker.add(replace(speech(key), inputs=text))
    ends = {key: outputs[-1] for key, outputs in finish(talker, *"abc").items()}
    read = sum(end.usage["prompt_tokens"] for end in ends.values())
    assert read > talker._loaded.vllm_config.scheduler_config.max_num_batched_tokens
    for end in ends.values():
        assert end.error is None
        assert through_a_connector(end.handoff)["payload"]["codes"]["audio"].tolist() == alone


def test_an_output_that_cannot_be_read_ends_its_own_request(whole: Pair, monkeypatch: Any) -> None:
    """1. of two requests in one step, the sound, the text or the hand-off of one can't be read any more
    2. that one fails, and vLLM has it no more; the other says what it says alone
    """
    talker: Any = whole.talker
    expected = handoff_of(whole, speech("good"))["payload"]["codes"]["audio"].tolist()
    for name in ("_read_output", "_hand_on", "_ended"):
        real = getattr(talker, name)

        def trip(run: Any, *more: Any, real: Any = real) -> Any:
            if run.request.key == "bad":
                raise IndexError("no such thing")
            return real(run, *more)

        monkeypatch.setattr(talker, name, trip)
        talker.add(speech("bad"))
        talker.add(speech("good"))
        ends = {key: outputs[-1] for key, outputs in finish(talker, "bad", "good").items()}
        monkeypatch.setattr(talker, name, real)
        assert ends["bad"].error == (FailureKind.ENGINE, "IndexError: no such thing")
        assert through_a_connector(ends["good"].handoff)["payload"]["codes"]["audio"].tolist() == expected
        idle(talker)
        assert not talker._runs
        assert not talker._loaded.core.scheduler.requests


def test_a_prompt_and_parameters_as_their_examples_write_them_say_the_same(whole: Pair) -> None:
    """Places in the prompt, all else as ``additional_information``; the smaller bound of the tokens holds."""
    words = {"task_type": "CustomVoice", "text": TEXT, "language": "English", "speaker": "Ethan", "instruct": ""}
    told = {name: [value] for name, value in words.items()}
    codes = [handoff_of(whole, speech("ours"))["payload"]["codes"]["audio"].tolist()]
    spellings: list[dict[str, Any]] = [
        {"max_new_tokens": [24]},
        {"max_new_tokens": [2048], "non_streaming_mode": [True]},
    ]
    for number, more in enumerate(spellings):
        params = {"seed": SPEECH["seed"], "max_tokens": 4096 if not number else 24, "detokenize": False}
        inputs = {"prompt_token_ids": [0] * 2048, "additional_information": {**told, **more}}
        asked = replace(speech(f"theirs{number}"), inputs=inputs, params=params)
        codes.append(handoff_of(whole, asked)["payload"]["codes"]["audio"].tolist())
    assert codes[0] == codes[1] == codes[2]
    # With the text piece by piece the talker says something else, of as many frames.
    piecewise: dict[str, Any] = {**told, "non_streaming_mode": [False]}
    other = replace(speech("piecewise"), inputs={"prompt": TEXT, "additional_information": piecewise})
    said = handoff_of(whole, replace(other, params={"seed": 3, "max_tokens": 24}))["payload"]["codes"]["audio"].tolist()
    assert said != codes[0]
    assert len(said) == len(codes[0])


def test_a_model_that_designs_voices_speaks_in_the_one_that_is_described(model: str, tmp_path: Path) -> None:
    """The same request says the same, in whole and as sound; another description is another voice."""
    design = tmp_path / "design"
    shutil.copytree(model, design)
    config = json.loads((design / "config.json").read_text())
    config["tts_model_type"] = "voice_design"
    config["talker_config"] |= {"spk_id": {}, "spk_is_dialect": {}}
    (design / "config.json").write_text(json.dumps(config))
    pair = Pair(str(design), async_chunk=False)
    try:
        assert getattr(pair.talker, "voices", None) == []
        handed = []
        for key, instruct in (("a", "a warm voice"), ("b", "a warm voice"), ("c", "a cold and distant voice")):
            params = {"max_tokens": 24, "seed": 3, "language": "English", "instruct": instruct}
            handed.append(handoff_of(pair, replace(speech(key), params=params)))
        first, again, other = (each["payload"]["codes"]["audio"].tolist() for each in handed)
        assert first == again != other
        heard = decode(pair, "a", handed[0])
        assert len(heard) == len(first) // 4 * 1920
        assert len(set(heard.tolist())) > 100, "that is silence"
    finally:
        pair.close()


def test_sound_comes_while_the_talker_still_speaks(chunked: Pair) -> None:
    """1. the decoder has begun, and said something, before the talker's end
    2. while it has nothing to decode, it need not be stepped
    3. the pieces all at once, as an edge without async_chunk brings them, make exactly the same sound
    """
    talker, decoder = chunked.talker, chunked.decoder
    talker.add(replace(speech("a"), stream_to=(1,)))
    decoder.add(StageRequest("a", "a", stream_from=(0,)))
    idle(decoder)
    pieces: list[Mapping[str, Any]] = []
    heard: list[EngineOutput] = []
    is_over, heard_before_the_end = False, 0
    until_s = time.monotonic() + WAIT_S
    while not (heard and heard[-1].finished):
        assert time.monotonic() < until_s
        for output in talker.step() if talker.has_unfinished() else ():
            if output.handoff_piece is not None:
                pieces.append(through_a_connector(output.handoff_piece))
                decoder.feed("a", 0, pieces[-1], False)  # type: ignore[attr-defined]
            if output.finished:
                assert output.handoff is None
                is_over = True
                decoder.feed("a", 0, None, True)  # type: ignore[attr-defined]
        if decoder.has_unfinished():
            heard += decoder.step()
        heard_before_the_end += bool(heard) and not is_over
    assert heard_before_the_end
    assert len(pieces) > 3
    assert ["source" in piece for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    again = decode(chunked, "b", {"pieces": pieces})
    assert np.array_equal(again, sound(heard))

    whole = handoff_of(chunked, speech("c"))
    assert set(whole) == {"pieces"}
    assert np.array_equal(decode(chunked, "c", whole), again)


def test_requests_that_wait_for_pieces_hold_nobody_up(chunked: Pair, whole: Pair) -> None:
    """As many as the decoder takes, more than it has places: all but one have heard their first piece and wait.

    1. that one is heard to its end
    2. so are the others when their pieces come, to at most one step of PCM16: a sum in another order
    """
    decoder: Any = chunked.decoder
    assert (decoder.capacity, whole.decoder.capacity) == (16, 4)
    good = handoff_of(chunked, speech("a"))["pieces"]
    expected = decode(chunked, "alone", {"pieces": good}).astype(int)
    waiting = [f"w{place}" for place in range(decoder.capacity - 1)]
    heard: dict[str, list[EngineOutput]] = {key: [] for key in waiting}
    for key in waiting:
        decoder.add(StageRequest(key, key, stream_from=(0,)))
        decoder.feed(key, 0, good[0], False)
    until_s = time.monotonic() + WAIT_S
    while not all(heard.values()) or decoder.has_unfinished():
        assert time.monotonic() < until_s, "not all have begun"
        for output in decoder.step():
            heard[output.key].append(output)
    assert np.abs(decode(chunked, "b", {"pieces": good}) - expected).max() <= 1
    for key in waiting:
        feed(decoder, key, good[1:])
    for key, outputs in finish(decoder, *waiting).items():
        assert np.abs(sound(heard[key] + outputs) - expected).max() <= 1


def test_requests_of_two_talkers_with_the_same_names_are_kept_apart(chunked: Pair) -> None:
    """Each replica of a stage counts its requests for itself, and the decoder keeps a state for each stream."""
    handed = [handoff_of(chunked, speech(key, seed=seed)) for key, seed in (("a", 3), ("b", 4))]
    alone = [decode(chunked, "alone", each) for each in handed]
    for each in handed:
        for piece in each["pieces"]:
            piece["payload"]["meta"]["request_id"] = "r0"
    for key, each in zip("ab", handed, strict=True):
        chunked.decoder.add(StageRequest(key, key, payloads={0: each}))
    together = finish(chunked.decoder, "a", "b")
    shortest = min(map(len, alone))
    assert np.abs(alone[0][:shortest] - alone[1][:shortest]).max() > 100
    for key, one in zip("ab", alone, strict=True):
        heard = sound(together[key])
        assert len(heard) == len(one)
        # Two in one step are added up in another order on some processors.
        assert np.abs(heard - one).max() <= 1


def test_a_stream_that_ends_too_early_or_holds_nonsense_fails_its_request_alone(chunked: Pair) -> None:
    decoder: Any = chunked.decoder
    good = handoff_of(chunked, speech("a"))["pieces"]
    expected = decode(chunked, "a", {"pieces": good})
    for key, pieces, said in [
        ("early", good[:2], "ended before its last piece"),
        ("nonsense", [{"payload": {"codes": {"audio": [99999] * 4}}, "source": good[0]["source"]}], "out of its book"),
        ("headless", good[1:], "the hand-off's source"),
    ]:
        decoder.add(StageRequest(key, key, stream_from=(0,)))
        with pytest.raises((InvalidRequestError, PayloadError), match=said):
            feed(decoder, key, pieces)
        decoder.abort(key)
        assert finish(decoder, key)[key][-1].finish_reason == "abort"
    assert np.array_equal(decode(chunked, "b", {"pieces": good}), expected)
    idle(decoder)


@pytest.mark.attack("R2")
@pytest.mark.parametrize(
    "meta",
    [
        {"ref_context_request_id": "x", "ref_context_size": 1_000_000},
        {"left_context_size": 1 << 40},
        {"left_context_size": "x"},
        {"left_context_size": []},
        {"request_id": {"a": 1}},
        {"is_segment_finished": []},
    ],
)
def test_a_hand_off_that_says_nonsense_of_itself_is_its_producers_mistake(
    meta: dict[str, Any], whole: Pair, chunked: Pair
) -> None:
    """1. the decoder speaks a request, and gets a second one whose hand-off would end it in a step
    2. that one is refused, with its producer's stage; the first is spoken to its end
    """
    for pair in (whole, chunked):
        good = handoff_of(pair, speech("a"))
        pieces = [
            {**piece, "payload": {**piece["payload"], "meta": {**piece["payload"]["meta"], **meta}}}
            for piece in good.get("pieces", [good])
        ]
        pair.decoder.add(StageRequest("good", "good", payloads={0: good}))
        bad = {"pieces": pieces} if "pieces" in good else pieces[0]
        with pytest.raises(PayloadError, match="the hand-off's meta") as told:
            pair.decoder.add(StageRequest("bad", "bad", payloads={0: bad}))
        assert told.value.from_stage == 0
        assert len(sound(finish(pair.decoder, "good")["good"])) > 0


@pytest.mark.attack("R3")
def test_a_hand_off_that_is_refused_late_leaves_nothing_in_the_engine(chunked: Pair, monkeypatch: Any) -> None:
    """1. of each of some hand-offs in pieces, the second can't be given any more once the first has begun
    2. all are refused; vLLM has none of them any more, and others are spoken
    """
    decoder: Any = chunked.decoder
    good = handoff_of(chunked, speech("a"))
    expected = decode(chunked, "a", good)
    mailbox, offer = decoder._loaded.mailbox, decoder._loaded.mailbox.offer

    def offer_one(name: str, from_stage: int, number: int, payload: Any) -> None:
        if number:
            raise TypeError("no more")
        offer(name, from_stage, number, payload)

    monkeypatch.setattr(mailbox, "offer", offer_one)
    for number in range(20):
        with pytest.raises(PayloadError, match="no more"):
            decoder.add(StageRequest(f"bad{number}", "bad", payloads={0: good}))
        decoder.step()
    monkeypatch.setattr(mailbox, "offer", offer)
    idle(decoder)
    assert not decoder._runs
    assert not decoder._loaded.core.scheduler.requests
    assert np.array_equal(decode(chunked, "b", good), expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"params": {**SPEECH, "speaker": "nobody"}}, "speaker: this model has ethan, not 'nobody'"),
        ({"params": {**SPEECH, "logprobs": 1}}, "logprobs: engine 'vllm-omni' does not take it"),
        ({"params": {**SPEECH, "max_tokens": 0}}, "max_tokens"),
        ({"params": {**SPEECH, "stop_token_ids": [999999]}}, "stop_token_ids: 999999 is out of the vocabulary"),
        ({"params": {**SPEECH, "other": 0}}, "'other' is not known"),
        ({"inputs": {}}, "give a prompt"),
        ({"inputs": {"prompt": "word " * 4000}}, "Make it shorter"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(whole: Pair, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        whole.talker.add(replace(speech("bad"), **change))
    assert not whole.talker.has_unfinished()


def test_a_hand_off_of_another_mode_is_refused(whole: Pair, chunked: Pair) -> None:
    pieces, one = handoff_of(chunked, speech("a")), handoff_of(whole, speech("a"))
    for decoder, handed in ((whole.decoder, pieces), (whole.decoder, {"payload": {}}), (whole.decoder, {})):
        with pytest.raises((InvalidRequestError, PayloadError)):
            decoder.add(StageRequest("b", "b", payloads={0: handed}))
    with pytest.raises(InvalidRequestError, match="async_chunk is false"):
        whole.decoder.add(StageRequest("b", "b", stream_from=(0,)))
    assert len(decode(whole, "b", one))


def test_a_stage_that_hands_nothing_over_ends_with_its_last_token(whole: Pair) -> None:
    whole.talker.add(replace(speech("a"), next_stages=()))
    end = finish(whole.talker, "a")["a"][-1]
    assert (end.handoff, end.finish_reason, end.error) == (None, "length", None)
    assert end.usage["completion_tokens"] == SPEECH["max_tokens"]


@pytest.mark.parametrize(
    ("engine_args", "stage_id", "said"),
    [
        ({"max_nmu_seqs": 1}, 0, "max_nmu_seqs"),
        ({}, 7, "has the stages 0, 1; give it their ids"),
    ],
)
def test_what_vllm_omni_does_not_know_is_the_operators_mistake(
    model: str, engine_args: dict[str, Any], stage_id: int, said: str
) -> None:
    stage = omni_stages(model, async_chunk=False)[0]
    changed = msgspec.structs.replace(stage, stage_id=stage_id, engine_args={**stage.engine_args, **engine_args})
    with pytest.raises(ConfigError, match=said):
        create_engine(changed).load(lambda *_: None)


def test_closing_ends_every_thread(model: str) -> None:
    before = {thread.name for thread in threading.enumerate()}
    pair = Pair(model, async_chunk=True)
    pair.close()
    pair.close()
    until_s = time.monotonic() + WAIT_S
    while left := {t.name for t in threading.enumerate()} - before - {"tqdm_monitor"}:
        assert time.monotonic() < until_s, left
        time.sleep(0.05)


class TestOmniKeepsTheContract(EngineContract):
    """The decoder, in pieces: what a later stage of every pipeline does."""

    offers = frozenset({"deterministic", "feed", "metrics"})
    folder: ClassVar[str] = ""

    @pytest.fixture(autouse=True, scope="class")
    def _model(self, model: str) -> None:
        type(self).folder = model

    def make_engine(self) -> Engine:
        return create_engine(omni_stages(self.folder, async_chunk=True)[1])

    def good_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, payloads={0: {"pieces": self.pieces()}})

    def bad_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, payloads={0: {"pieces": self.pieces()[:-1]}})

    def pieces(self) -> list[Mapping[str, Any]]:
        made: list[Mapping[str, Any]] = []
        for number, frames in enumerate((1, 4, 3)):
            is_last = torch.tensor(number == 2)
            meta = {"finished": is_last, "is_segment_finished": is_last, "left_context_size": 0}
            source = {} if number else {"source": {"prompt_token_ids": [1] * 20}}
            made.append({"payload": {"codes": {"audio": torch.arange(4 * frames) + number}, "meta": meta}, **source})
        return made
