"""The engine of vLLM-Omni's stages with tiny Qwen2.5-Omni and Qwen3-Omni models: text and sound, all stages in one
process.

Needs the environment that `make omni-test` makes.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni has an environment of its own: make omni-test", allow_module_level=True)

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.config import PayloadError
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest, create_engine
from stage_runtime.supervisor.environment import stage_environment
from tests.support.media_host import media_host
from tests.support.omni_chain import WAIT_S, Answer, Chain, finish, idle, sound, through_a_connector
from tests.support.omni_media import tone, video
from tests.support.omni_models import OMNI_PARAMS, qwen_omni_stages
from tests.support.tiny_qwen_omni import WRITERS

pytestmark = [
    pytest.mark.vllm,
    # Of the libraries, about each other.
    pytest.mark.filterwarnings("ignore"),
]
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi there"}]
CHAT = {"messages": MESSAGES}
QWEN2_5, QWEN3 = "qwen2_5_omni", "qwen3_omni_moe"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The models' folders, by model type."""
    parent = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        stage = qwen_omni_stages(str(parent))[0]
        for name, value in {**stage_environment(stage, True), "MASTER_ADDR": "127.0.0.1"}.items():
            patch.setitem(os.environ, name, value)
        for kind, write in WRITERS.items():
            write(parent / kind)
        yield parent


@dataclass(frozen=True)
class Kind:
    """A model, and how its stages hand over."""

    model_type: str
    async_chunk: bool
    #: Of its pipeline: that of the thinker alone, by its name, in place of the model's own.
    pipeline: str = ""

    def stages(self, folder: Path) -> tuple[StageConfig, ...]:
        dtype = "bfloat16" if self.model_type == QWEN3 else "float32"
        first, *others = qwen_omni_stages(str(folder / self.model_type), async_chunk=self.async_chunk, dtype=dtype)
        args = {**first.engine_args, "allowed_media_domains": ["127.0.0.1"], "allowed_local_media_path": str(folder)}
        if self.pipeline:
            return (msgspec.structs.replace(first, engine_args={**args, "pipeline": self.pipeline}),)
        return msgspec.structs.replace(first, engine_args=args), *others


WHOLE_2_5, WHOLE_3, PIECES_3 = Kind(QWEN2_5, False), Kind(QWEN3, False), Kind(QWEN3, True)
ALONE_2_5, ALONE_3 = (Kind(each, False, f"{each}_thinker_only") for each in (QWEN2_5, QWEN3))


def of(*kinds: Kind) -> pytest.MarkDecorator:
    """Run the test with these, each in its turn: vLLM keeps much for the whole process, so there is one at a time."""
    names = [f"{kind.pipeline or kind.model_type}-{'pieces' if kind.async_chunk else 'whole'}" for kind in kinds]
    return pytest.mark.parametrize("chain", kinds, indirect=True, ids=names, scope="module")


# A mixture of experts first: vLLM makes a process's groups with its first model.
every = of(WHOLE_3, PIECES_3, WHOLE_2_5)


@pytest.fixture(scope="module")
def chain(request: pytest.FixtureRequest, folder: Path) -> Iterator[Chain]:
    made = Chain(request.param.stages(folder))
    yield made
    made.close()


def params(seed: int = 5, **thinkers: Any) -> list[dict[str, Any]]:
    first, second, third = OMNI_PARAMS
    return [{**first, **thinkers}, {**second, "seed": seed}, {**third, "seed": seed}]


def codes_of(answer: Answer) -> list[int]:
    """All codes that the talker handed over."""
    handed = answer.handed[-1]
    found: list[int] = []
    for piece in handed.get("pieces", [handed]):
        codes = piece["payload"]["codes"]["audio"]
        found += codes.tolist() if hasattr(codes, "tolist") else codes
    return found


@every
def test_text_and_sound_of_a_chat_are_the_same_on_every_attempt(chain: Chain) -> None:
    """1. a chat is answered by text, in pieces, and by sound, at the rate of the model
    2. the same request makes the same text, codes and samples again: after others, beside others, after an abort
    3. another seed makes another sound of the same text
    """
    assert [getattr(engine, "deterministic", False) for engine in chain.engines] == [True] * 3
    first = chain.ask({"a": CHAT}, params())["a"]
    assert len(first.texts) > 8
    assert len(set(first.samples.tolist())) > 100, "that is silence"
    assert len(first.samples) >= 14 * 480

    chain.engines[0].add(StageRequest("gone", "gone", inputs=CHAT, params=params()[0], next_stages=(1,)))
    chain.engines[0].step()
    chain.engines[0].abort("gone")
    assert finish(chain.engines[0], "gone")["gone"][-1].finish_reason == "abort"
    other = {"messages": [{"role": "user", "content": "and what of the other one, which is longer?"}]}
    again = chain.ask({"x": other, "b": CHAT}, params())
    assert again["b"].text == first.text != again["x"].text
    assert codes_of(again["b"]) == codes_of(first) != codes_of(again["x"])
    assert np.array_equal(again["b"].samples, first.samples)

    changed = chain.ask({"c": CHAT}, params(seed=6))["c"]
    assert changed.text == first.text
    assert codes_of(changed) != codes_of(first)
    assert not np.array_equal(changed.samples, first.samples)


@every
def test_lost_stages_are_made_up_for_from_the_kept_hand_offs(chain: Chain) -> None:
    """The talker and the decoder run again from what came to them, whatever was drawn at random in between."""
    first = chain.ask({"a": CHAT}, params())["a"]
    torch.manual_seed(time.monotonic_ns() % 1000)
    talker, decoder = chain.engines[1:]
    talker.add(StageRequest("b", "b", params=params()[1], payloads={0: first.handed[0]}, next_stages=(2,)))
    spoken = through_a_connector(finish(talker, "b")["b"][-1].handoff)
    assert codes_of(Answer(handed=[spoken])) == codes_of(first)
    torch.manual_seed(7)
    decoder.add(StageRequest("b", "b", params=params()[2], payloads={1: spoken}))
    assert np.array_equal(sound(finish(decoder, "b")["b"]), first.samples)


@every
def test_a_prompt_that_is_no_chat_is_the_users_message(chain: Chain) -> None:
    chat = {"messages": [{"role": "user", "content": "hi there"}]}
    marked = {"prompt": "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"}
    answers = chain.ask({"a": chat, "b": {"prompt": "hi there"}, "c": marked}, params(), stages=1)
    assert answers["a"].text == answers["b"].text == answers["c"].text
    assert torch.equal(hidden_of(answers["a"]), hidden_of(answers["b"]))


@every
def test_a_seed_is_made_of_the_request_where_it_has_none(chain: Chain) -> None:
    """Also for a thinker that draws its words: another attempt of the request says the same."""
    free: list[dict[str, Any]] = [{"max_tokens": 12, "temperature": 1.0}, {"max_tokens": 6}, {}]
    first, again = (chain.ask({"same": CHAT}, free, stages=2)["same"] for _ in range(2))
    other = chain.ask({"other": CHAT}, free, stages=2)["other"]
    assert first.text == again.text != other.text
    assert codes_of(first) == codes_of(again) != codes_of(other)


@pytest.mark.attack("L7")
@of(WHOLE_2_5)
def test_a_talker_speaks_without_a_penalty_for_repetition(chain: Chain) -> None:
    """Its model looks at prompts that vLLM gathers for penalties alone. Beside a request that has one, too."""
    without = params()
    without[1] |= {"repetition_penalty": 1.0}
    alone = chain.ask({"a": CHAT}, without, stages=2)["a"]
    assert len(codes_of(alone)) > 1
    given = chain.ask({"b": CHAT}, params(), stages=1)["b"].handed[0]
    talker = chain.engines[1]
    for key, asked in (("with", params()[1]), ("without", without[1])):
        talker.add(StageRequest(key, "a", params=asked, payloads={0: given}, next_stages=(2,)))
    both = finish(talker, "with", "without")
    handed = both["without"][-1].handoff
    assert handed is not None
    assert codes_of(Answer(handed=[handed])) == codes_of(alone)


@every
def test_hidden_states_keep_their_dtype(chain: Chain, request: pytest.FixtureRequest) -> None:
    """With the ids of the tokens that they belong to; bfloat16 stays bfloat16 through a connector."""
    dtype = torch.float32 if request.node.callspec.params["chain"] == WHOLE_2_5 else torch.bfloat16
    handed = chain.ask({"a": CHAT}, params(), stages=1)["a"].handed[0]
    first = handed.get("pieces", [handed])[0]
    payload = first["payload"]
    assert (payload["embed"]["prefill"].dtype, payload["hidden_states"]["output"].dtype) == (dtype, dtype)
    assert payload["ids"]["prompt"] == first["source"]["prompt_token_ids"]


@of(WHOLE_3, WHOLE_2_5)
def test_an_answer_of_one_token_is_text_alone(chain: Chain) -> None:
    """It leaves no hidden state to speak: the stages after have nothing to do. The next request is spoken again."""
    thinker = chain.engines[0]
    thinker.add(StageRequest("a", "a", inputs=CHAT, params=params(max_tokens=1)[0], next_stages=(1,)))
    outputs = finish(thinker, "a")["a"]
    assert (outputs[-1].handoff, outputs[-1].error, outputs[-1].finish_reason) == (None, None, "length")
    assert outputs[0].text
    assert len(chain.ask({"b": CHAT}, params(max_tokens=2))["b"].samples)


@of(PIECES_3)
def test_in_pieces_sound_comes_while_the_thinker_still_writes(chain: Chain) -> None:
    """1. the decoder has said something before the thinker's last token, and the talker has ended before it
    2. the pieces all at once make exactly the same sound
    """
    asked = params(max_tokens=48)
    engines: list[Any] = chain.engines
    ends: list[int] = []
    heard: list[EngineOutput] = []
    for number, engine in enumerate(engines):
        engine.add(
            StageRequest(
                "a",
                "a",
                inputs={} if number else CHAT,
                params=asked[number],
                next_stages=(number + 1,) if number < 2 else (),
                stream_from=(number - 1,) if number else (),
                stream_to=(number + 1,) if number < 2 else (),
            )
        )
    until_s = time.monotonic() + WAIT_S
    heard_before_the_end = 0
    while not (heard and heard[-1].finished):
        assert time.monotonic() < until_s
        for number, engine in enumerate(engines):
            for output in engine.step() if engine.has_unfinished() else ():
                assert output.error is None
                if number == 2:
                    heard.append(output)
                    heard_before_the_end += 0 not in ends
                elif output.handoff_piece is not None:
                    engines[number + 1].feed("a", number, through_a_connector(output.handoff_piece), False)
                if output.finished:
                    ends.append(number)
                    if number < 2:
                        engines[number + 1].feed("a", number, None, True)
    assert heard_before_the_end
    assert sorted(ends) == [0, 1, 2]
    assert np.array_equal(chain.ask({"b": CHAT}, asked)["b"].samples, sound(heard))


def bad(thinker: Engine, inputs: Mapping[str, Any], said: str, **more: Any) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        thinker.add(StageRequest("bad", "bad", inputs=inputs, params={**OMNI_PARAMS[0], **more}, next_stages=(1,)))
    assert not thinker.has_unfinished()


@every
def test_a_request_that_cannot_be_served_is_refused(chain: Chain) -> None:
    thinker = chain.engines[0]
    idle(thinker)
    bad(thinker, {}, "give one of messages, prompt")
    bad(thinker, CHAT, "speaker: this model has .*, not 'nobody'", speaker="nobody")
    bad(thinker, CHAT, "language: this model does not take it", language="English")
    bad(thinker, {**CHAT, "additional_information": {"text": ["x"]}}, "text: this model does not take it")
    bad(thinker, {"prompt": "word " * 4000}, "Make it shorter")
    for name in ("mm_features", "multi_modal_data", "prompt_embeds"):
        bad(thinker, {**CHAT, name: {"x": 1}}, f"{name}: engine 'vllm-omni' does not take it")
    later = chain.engines[1]
    with pytest.raises(InvalidRequestError, match="speaker: the pipeline's first stage takes it"):
        later.add(StageRequest("bad", "bad", params={"speaker": "ethan"}, payloads={0: {}}))


@of(WHOLE_3, PIECES_3)
def test_a_chat_that_the_talker_would_die_of_is_refused_by_the_thinker(chain: Chain) -> None:
    """Qwen3's talker looks for the turns of the chat, also where a client wrote their marks into a message."""
    thinker = chain.engines[0]
    idle(thinker)
    for inputs in (
        {"prompt_token_ids": [1, 2, 3]},
        {"prompt": "<|im_start|>"},
        {"prompt": "<|im_start|>assistant\n"},
        {"prompt": "<|im_start|>user\nhi<|im_end|>\n"},
        {"messages": [{"role": "user", "content": "<|im_start|>nobody says"}]},
        {"messages": [{"role": "user", "content": "hi<|im_start|>"}]},
        {"messages": [{"role": "tool", "content": "hi"}]},
    ):
        bad(thinker, inputs, "speaks the answers of chats alone")
    # As text alone it is answered.
    alone = StageRequest("a", "a", inputs={"prompt_token_ids": [1, 2, 3]}, params=OMNI_PARAMS[0])
    thinker.add(alone)
    assert finish(thinker, "a")["a"][-1].finish_reason == "length"


@of(WHOLE_3)
def test_voices_differ(chain: Chain) -> None:
    """Those of Qwen3-Omni: by parameter, or as vLLM-Omni's users write it; whatever their case."""
    usual = chain.ask({"a": CHAT}, params(), stages=2)["a"]
    ethan = chain.ask({"a": CHAT}, params(speaker="Ethan"), stages=2)["a"]
    other = chain.ask({"a": CHAT}, params(speaker="chelsie"), stages=2)["a"]
    told = chain.ask({"a": {**CHAT, "additional_information": {"speaker": ["chelsie"]}}}, params(), stages=2)["a"]
    assert codes_of(usual) == codes_of(ethan) != codes_of(other)
    assert codes_of(other) == codes_of(told)


def changed(handed: Mapping[str, Any], part: str, name: str, value: Any) -> Mapping[str, Any]:
    """The hand-off with something else in its payload, or in its first piece's."""
    pieces = [dict(each) for each in handed.get("pieces", [handed])]
    payload = pieces[0]["payload"]
    pieces[0]["payload"] = {**payload, part: {**payload.get(part, {}), name: value}}
    return {"pieces": pieces} if "pieces" in handed else pieces[0]


def said_of(chain: Chain, *parts: Mapping[str, Any], stages: int = 1, **more: Any) -> Answer:
    content = [*parts, {"type": "text", "text": "what is this"}]
    return chain.ask({"a": {"messages": [{"role": "user", "content": content}], **more}}, params(), stages=stages)["a"]


def shown(level: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (level, 0, 255 - level)).save(buffer, "PNG")
    return {"type": "image_url", "image_url": {"url": url_of(buffer.getvalue(), "image/png")}}


def url_of(file: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


@of(ALONE_3, ALONE_2_5)
def test_a_thinker_alone_writes_of_chats_pictures_sound_and_videos(chain: Chain) -> None:
    """vLLM-Omni's pipelines of one stage, as its Thinking and Captioner models have them.

    1. the same request is answered the same, beside others too; a prompt that is no chat is the user's message
    2. each kind of part takes places in the prompt; a voice is refused
    """
    (thinker,) = chain.engines
    assert getattr(thinker, "deterministic", False)

    def written(requests: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, int]]:
        for key, inputs in requests.items():
            thinker.add(StageRequest(key, key, inputs=inputs, params={"max_tokens": 12, "seed": 5}))
        ends = finish(thinker, *requests)
        assert [outputs[-1].error for outputs in ends.values()] == [None] * len(ends)
        return {
            key: ("".join(each.text for each in outputs), outputs[-1].usage["prompt_tokens"])
            for key, outputs in ends.items()
        }

    user = {"messages": [{"role": "user", "content": "hi there"}]}
    first = written({"a": user})["a"]
    assert len(first[0].split()) == 12
    assert written({"b": user, "c": CHAT, "d": {"prompt": "hi there"}}) | {"c": first} == dict.fromkeys("bcd", first)
    sounding = {"type": "audio_url", "audio_url": {"url": url_of(tone(0.6), "audio/wav")}}
    film = {"type": "video_url", "video_url": {"url": url_of(video(8, sound_s=0.8), "video/mp4")}}
    for number, part in enumerate((shown(250), sounding, film)):
        content = [part, {"type": "text", "text": "hi there"}]
        assert written({f"p{number}": {"messages": [{"role": "user", "content": content}]}})[f"p{number}"][1] > first[1]
    with pytest.raises(InvalidRequestError, match="speaker: this model does not take it"):
        thinker.add(StageRequest("bad", "bad", inputs=user, params={"speaker": "ethan"}))


@of(WHOLE_3, PIECES_3, WHOLE_2_5)
def test_pictures_sound_and_videos_are_seen_heard_and_said_of(chain: Chain) -> None:
    """1. each kind of part is read where the thinker runs, and changes what the talker gets of the prompt
    2. the same request is answered the same again; beside a prompt, files as bytes do as well
    """
    plain = said_of(chain)
    high, low = (tone(0.6, pitch_hz=pitch) for pitch in (1200, 300))
    clip = url_of(video(8, sound_s=0.8), "video/mp4")
    answers = [
        said_of(chain, shown(250)),
        said_of(chain, shown(5)),
        said_of(chain, {"type": "input_audio", "input_audio": {"data": base64.b64encode(high).decode()}}),
        said_of(chain, {"type": "audio_url", "audio_url": {"url": url_of(low, "audio/wav")}}),
        said_of(chain, {"type": "video_url", "video_url": {"url": clip}}),
        said_of(chain, {"type": "video_url", "video_url": clip}, mm_processor_kwargs={"use_audio_in_video": True}),
    ]
    prompts = [source_of(answer)["prompt_token_ids"] for answer in answers]
    assert all(len(prompt) > len(source_of(plain)["prompt_token_ids"]) for prompt in prompts)
    # The sound of a video takes places of its own.
    assert len(prompts[5]) > len(prompts[4])
    states = [hidden_of(answer) for answer in answers]
    for one in range(2):
        first, second = states[2 * one], states[2 * one + 1]
        assert first.shape == second.shape
        assert not torch.equal(first, second)
    beside = chain.ask({"a": {"prompt": "what is this", "audios": [low]}}, params(), stages=1)["a"]
    assert torch.equal(hidden_of(beside), states[3])
    # All of them together, to the end.
    everything = [shown(250), shown(5), {"type": "audio_url", "audio_url": url_of(low, "audio/wav")}]
    everything.append({"type": "video_url", "video_url": {"url": clip}})
    spoken, repeated = (said_of(chain, *everything, stages=3) for _ in range(2))
    assert len(set(spoken.samples.tolist())) > 100, "that is silence"
    assert spoken.text == repeated.text
    assert np.array_equal(spoken.samples, repeated.samples)


@of(WHOLE_3)
def test_files_are_fetched_from_where_the_stage_allows_it(chain: Chain, folder: Path) -> None:
    low, high = tone(0.6, pitch_hz=300), tone(0.6, pitch_hz=1200)
    (folder / "low.wav").write_bytes(low)
    given = hidden_of(said_of(chain, {"type": "audio_url", "audio_url": {"url": url_of(low, "audio/wav")}}))
    with media_host({"low.wav": low, "high.wav": high}) as host:
        urls = [f"http://{host}/low.wav", f"file://{folder}/low.wav", f"http://{host}/high.wav"]
        same, local, other = (hidden_of(said_of(chain, {"type": "audio_url", "audio_url": url})) for url in urls)
    assert torch.equal(given, same)
    assert torch.equal(given, local)
    assert not torch.equal(given, other)


def source_of(answer: Answer) -> Mapping[str, Any]:
    handed = answer.handed[0]
    source: Mapping[str, Any] = handed.get("pieces", [handed])[0]["source"]
    return source


def hidden_of(answer: Answer) -> torch.Tensor:
    """What the talker gets of the prompt: Qwen3's first table is of the tokens alone, also where a picture is shown."""
    handed = answer.handed[0]
    payload = handed.get("pieces", [handed])[0]["payload"]
    return torch.cat([payload["embed"]["prefill"], payload["hidden_states"]["output"]])


@every
def test_bad_items_are_the_clients_mistake_and_other_requests_go_on(chain: Chain) -> None:
    """They are decoded in a thread, so the mistake comes out of a step, of the client's kind."""
    thinker = chain.engines[0]
    plain = chain.ask({"a": CHAT}, params(), stages=1)["a"]
    bad_ones = {
        "broken": {"type": "image_url", "image_url": url_of(b"no picture", "image/png")},
        "link": {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/x.wav"}},
        "file": {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        "noise": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    }
    many = [{"type": "audio_url", "audio_url": url_of(tone(29.0, kind="FLAC"), "audio/flac")}] * 6
    thinker.add(StageRequest("good", "good", inputs=CHAT, params=params()[0], next_stages=(1,)))
    asked = {**{key: [part] for key, part in bad_ones.items()}, "many": many}
    for key, content in asked.items():
        inputs = {"messages": [{"role": "user", "content": content}]}
        thinker.add(StageRequest(key, key, inputs=inputs, params=params()[0], next_stages=(1,)))
    gone = {"messages": [{"role": "user", "content": [shown(5)]}]}
    thinker.add(StageRequest("gone", "gone", inputs=gone, params=params()[0], next_stages=(1,)))
    thinker.abort("gone")
    said = finish(thinker, "good", "gone", *asked)
    assert "".join(output.text for output in said["good"]) == plain.text
    assert said["gone"][-1].finish_reason == "abort"
    for key in asked:
        error = said[key][-1].error
        assert error is not None, key
        assert error[0] == FailureKind.INVALID, error
    idle(thinker)


@pytest.mark.attack("G1")
@every
def test_others_are_answered_while_a_long_prompt_is_read(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. two long prompts; the tokenizer does not come to an end with them; 2. another request is answered
    3. the second is aborted; the first is read, and is too long for the model
    """
    thinker, go_on = chain.engines[0], threading.Event()
    plain = chain.ask({"a": CHAT}, params(), stages=1)["a"]
    bounded = thinker._tokenizer  # type: ignore[attr-defined]
    real = bounded._tokenizer

    class Slow:
        def encode(self, text: str, **options: Any) -> list[int]:
            if len(text) > 1000:
                assert go_on.wait(WAIT_S)
            return list(real.encode(text, **options))

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    monkeypatch.setattr(bounded, "_tokenizer", Slow())
    # As if so long a text could fit.
    monkeypatch.setattr(bounded, "_token_characters", 10_000)
    long = {"messages": [{"role": "user", "content": "word " * 14_000}]}
    for key, inputs in (("long", long), ("second", {"prompt": "many " * 14_000}), ("good", CHAT)):
        thinker.add(StageRequest(key, key, inputs=inputs, params=params()[0], next_stages=(1,)))
    said = finish(thinker, "good")["good"]
    assert "".join(output.text for output in said) == plain.text
    thinker.abort("second")
    assert finish(thinker, "second")["second"][-1].finish_reason == "abort"
    go_on.set()
    error = finish(thinker, "long")["long"][-1].error
    assert error is not None
    assert (error[0], "Make it shorter" in error[1]) == (FailureKind.INVALID, True), error
    idle(thinker)


@every
def test_what_a_client_may_say_of_the_processing_is_named(chain: Chain) -> None:
    thinker = chain.engines[0]
    for wrong in ({"size": {"longest_edge": 1 << 30}}, {"device": "cuda"}, {"use_audio_in_video": "yes"}, 7):
        bad(thinker, {**CHAT, "mm_processor_kwargs": wrong}, "mm_processor_kwargs: ")


@every
def test_hidden_states_that_do_not_fit_are_refused_and_the_talker_lives(chain: Chain) -> None:
    first = chain.ask({"a": CHAT}, params(), stages=2)["a"]
    talker = chain.engines[1]
    for part, name, value in (
        ("embed", "prefill", torch.zeros(28, 7)),
        ("embed", "prefill", torch.zeros(3, 64)),
        ("embed", "prefill", None),
        ("embed", "prefill", torch.zeros(28, 64, dtype=torch.int64)),
        ("hidden_states", "output", torch.zeros(0, 64)),
        ("ids", "prompt", [-1, 5]),
        ("ids", "prompt", []),
        ("ids", "prompt", [1 << 40]),
        ("meta", "num_processed_tokens", "x"),
    ):
        handed = changed(first.handed[0], part, name, value)
        with pytest.raises(PayloadError, match=r"the hand-off's|chats alone"):
            talker.add(StageRequest("bad", "bad", params=params()[1], payloads={0: handed}, next_stages=(2,)))
    idle(talker)
    again = chain.ask({"b": CHAT}, params(), stages=2)["b"]
    assert codes_of(again) == codes_of(first)


@pytest.mark.attack("Z76")
@of(WHOLE_3, PIECES_3)
def test_the_marks_of_another_hand_off_change_nobodys_sound(chain: Chain) -> None:
    """What speaks on behind the thinker's text does so with the marks that came with that text."""
    told = params(max_tokens=4)
    first = chain.ask({"a": CHAT}, told, stages=2)["a"]
    handed = strange = first.handed[0]
    for name in ("tts_bos", "tts_eos", "tts_pad"):
        strange = changed(strange, "embed", name, torch.full((1, 1, 64), 9.0, dtype=torch.bfloat16))
    talker = chain.engines[1]
    talker.add(StageRequest("a", "a", params=told[1], payloads={0: handed}, next_stages=(2,)))
    talker.step()
    talker.add(StageRequest("b", "b", params=told[1], payloads={0: strange}, next_stages=(2,)))
    said = finish(talker, "a", "b")
    codes = {key: codes_of(Answer(handed=[through_a_connector(said[key][-1].handoff)])) for key in said}
    assert codes["a"] == codes_of(first) != codes["b"]


@every
def test_codes_out_of_the_book_are_refused(chain: Chain) -> None:
    spoken = chain.ask({"a": CHAT}, params(), stages=2)["a"].handed[1]
    with pytest.raises(PayloadError, match="out of its book"):
        chain.engines[2].add(StageRequest("bad", "bad", payloads={1: changed(spoken, "codes", "audio", [9000] * 16)}))


@every
def test_the_pipelines_own_stop_tokens_stay(chain: Chain) -> None:
    """A client's come on top: without its own a talker would not end."""
    talker: Any = chain.engines[1]
    given = chain.ask({"a": CHAT}, params(), stages=1)["a"].handed[0]
    request = StageRequest("b", "b", params={"stop_token_ids": [17], "max_tokens": 1}, payloads={0: given})
    talker.add(request)
    run = talker._runs["b"]
    assert {17, 8294} <= set(run.params.stop_token_ids) or {17, 2150} <= set(run.params.stop_token_ids)
    finish(talker, "b")


@pytest.mark.parametrize(
    ("stage_id", "engine_args", "said"),
    [
        (0, {"async_chunk": True}, "async_chunk"),
        (2, {"max_num_seqs": 4}, "engine_args.max_num_seqs is 4"),
    ],
)
def test_what_qwen2_5_cannot_do_is_the_operators_mistake(
    folder: Path, stage_id: int, engine_args: dict[str, Any], said: str
) -> None:
    stage = WHOLE_2_5.stages(folder)[stage_id]
    changed_stage = msgspec.structs.replace(stage, engine_args={**stage.engine_args, **engine_args})
    with pytest.raises(ConfigError, match=said):
        create_engine(changed_stage).load(lambda *_: None)
