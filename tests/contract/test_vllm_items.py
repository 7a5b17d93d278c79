"""Pictures beside the prompt of a vLLM stage: in messages, in hand-offs, refused; and looked at by a tiny model."""

from __future__ import annotations

import base64
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from hub.api.routes import build_app
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.engines.base import StageRequest, create_engine
from stage_runtime.engines.media.items import PICTURES, take_items
from stage_runtime.engines.vllm.engine import VllmEngine
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.prompt import read_handed, read_request
from stage_runtime.testing import drain, run
from tests.support.engines import DEMO, THINKER, as_the_supervisor_has_it, skip_without_vllms_server
from tests.support.hub_fakes import deploy_of
from tests.support.local_replica import LocalReplica
from tests.support.serving import HUBS, hub_of

pytestmark = pytest.mark.long

torch.set_num_threads(1)

IMAGE_TOKENS = 4
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def picture(color: str, size_px: int = 40) -> Image.Image:
    """Half of it in that colour."""
    made = Image.new("RGB", (size_px, size_px), "white")
    made.paste(color, (0, 0, size_px // 2, size_px))
    return made


def data_url(made: Image.Image) -> str:
    buffer = io.BytesIO()
    made.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def unusual_picture() -> Image.Image:
    """In part transparent, as a palette has it."""
    made = picture("red").convert("P")
    made.info["transparency"] = 0
    return made


def message(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def shown(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


TEXT = {"type": "text", "text": "what is this"}


def test_pictures_are_taken_out_of_messages_and_their_places_stay() -> None:
    red = picture("red")
    inputs, items = take_items(message(shown({"url": data_url(red)}), TEXT, shown(data_url(red))), PICTURES)
    assert inputs == message({"type": "image"}, TEXT, {"type": "image"})
    assert items is not None
    assert [each.tobytes() for each in items["image"]] == [red.tobytes()] * 2
    for plain in ({"prompt": "x"}, message(TEXT), {"messages": "x"}, {"messages": ["x"]}):
        assert take_items(plain, PICTURES) == (plain, None)


def test_a_prompt_has_its_pictures_beside_it_as_files_or_urls() -> None:
    """It leaves their places itself. Messages hold theirs in parts, and what is no list of pictures is none."""
    red = picture("red")
    url = data_url(red)
    file = base64.b64decode(url.partition(",")[2])
    for prompt in ({"prompt_token_ids": [5]}, {"prompt": "x"}):
        inputs, items = take_items({**prompt, "images": [file, {"url": url}]}, PICTURES)
        assert inputs == prompt
        assert items is not None
        assert [each.tobytes() for each in items["image"]] == [red.tobytes()] * 2
        assert take_items({**prompt, "images": ()}, PICTURES) == (prompt, None)
    for wrong in ({"prompt": "x", "images": file}, {**message(TEXT), "images": [file]}, {"images": [b"noise"]}):
        with pytest.raises(InvalidRequestError):
            take_items(wrong, PICTURES)
    asked = StageRequest("a", "a", inputs={"prompt_token_ids": [5], "images": [file]}, params={})
    with pytest.raises(InvalidRequestError, match="takes no pictures"):
        read_request(asked, Model(None, 128, 640, frozenset()), [])


def test_pictures_are_not_too_large_together() -> None:
    """Each of them small as a file, and each by itself not too large: an engine would hold the pixels of all."""
    url = data_url(Image.new("1", (6_000, 6_000)))
    for inputs in (message(shown(url), shown(url), TEXT), {"prompt": "x", "images": [url, url]}):
        with pytest.raises(InvalidRequestError, match="6000 x 6000 behind 1 others is too large"):
            take_items(inputs, PICTURES)
    _, items = take_items(message(shown(url), TEXT), PICTURES)
    assert items is not None


def test_a_picture_is_shown_upright_and_on_white() -> None:
    """As a camera says that it was held, and where it is transparent; programs of others are started for none."""
    tall, clear = picture("red").crop((0, 0, 40, 20)), Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    turned = Image.Exif()
    turned[0x112] = 6
    files = []
    for made, kind, more in ((tall, "PNG", {"exif": turned}), (clear, "PNG", {}), (tall, "EPS", {})):
        buffer = io.BytesIO()
        made.save(buffer, kind, **more)
        files.append(buffer.getvalue())
    _, items = take_items({"prompt": "x", "images": files[:2]}, PICTURES)
    assert items is not None
    assert items["image"][0].size == (20, 40)
    assert items["image"][1].getpixel((0, 0)) == (255, 255, 255)
    with pytest.raises(InvalidRequestError, match="can't be read"):
        take_items({"prompt": "x", "images": files[2:]}, PICTURES)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://127.0.0.1/x.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        (None, "nothing is fetched"),
        ({"url": 5}, "nothing is fetched"),
        ("data:image/png;base64,@@@@", "can't be read"),
        ("data:image/png;base64,AAAA", "can't be read"),
        (data_url(picture("red"))[:-60], "can't be read"),
        (data_url(Image.new("1", (20_000, 20_000))), "can't be read|too large"),
        (data_url(Image.new("1", (9_000, 9_000))), "too large"),
    ],
    ids=lambda value: str(value)[:24],
)
@pytest.mark.filterwarnings("ignore:Image size")
def test_what_is_no_picture_is_refused(url: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        take_items(message(shown(url)), PICTURES)


@pytest.mark.parametrize(
    ("handed", "takes_items", "named"),
    [
        ([{"token_ids": [5], "multi_modal_data": {"image": 1}}], False, "takes none"),
        ([{"token_ids": [5], "multi_modal_data": 7}], True, "mapping"),
        ([{"token_ids": [5], "multi_modal_data": {}}] * 2, True, "once"),
    ],
    ids=str,
)
def test_items_of_a_hand_off_are_refused_where_they_can_not_be_used(
    handed: list[dict[str, Any]], takes_items: bool, named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        read_handed(handed, Model(None, 128, 640, frozenset(), takes_items=takes_items))


# ---- a model that looks

LONG = pytest.mark.skipif(not os.environ.get("OMNI_LONG"), reason="the long form: make long")


def build_model(folder: Path) -> Path:
    """A BLIP-2 of noise with 190 000 weights, and a template that leaves the picture's place to vLLM: the front."""
    from transformers import (
        AddedToken,
        AutoTokenizer,
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        BlipImageProcessor,
        OPTConfig,
    )

    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2}
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO / "thinker"))
    # Not as the tokenizer's image_token: the processor, which vLLM 0.28 gives text too, expects that to be no text.
    tokenizer.add_tokens([AddedToken("<image>", normalized=False, special=True)], special_tokens=True)
    tokenizer.chat_template = (
        "{% for part in messages[0]['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    )
    text = OPTConfig(
        vocab_size=704, hidden_size=64, ffn_dim=128, word_embed_proj_dim=64, max_position_embeddings=256,
        eos_token_id=1, pad_token_id=0, bos_token_id=1, **sizes,
    )  # fmt: skip
    vision = Blip2VisionConfig(hidden_size=32, intermediate_size=64, image_size=28, patch_size=14, **sizes)
    former = Blip2QFormerConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        encoder_hidden_size=32,
        cross_attention_frequency=2,
        **sizes,
    )
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    assert isinstance(image_token, int)
    config = Blip2Config(
        vision_config=vision.to_dict(),
        qformer_config=former.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=image_token,
    )
    model = Blip2ForConditionalGeneration(config)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(0, 0.3, generator=noise)
    model.save_pretrained(folder)
    looker = BlipImageProcessor(size={"height": 28, "width": 28})
    Blip2Processor(image_processor=looker, tokenizer=tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def looker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    with as_the_supervisor_has_it():
        folder = build_model(tmp_path_factory.mktemp("model"))
        engine_args = {**THINKER.engine_args, "handoff": {"hidden_states": True}, "limit_mm_per_prompt": {"image": 1}}
        engine = create_engine(msgspec.structs.replace(THINKER, model=str(folder), engine_args=engine_args))
        assert isinstance(engine, VllmEngine)
        engine.load(lambda _phase, _progress: None)
        yield engine
        engine.close()


def ask(key: str, *parts: dict[str, Any]) -> StageRequest:
    return StageRequest(key, key, inputs=message(*parts), params=GREEDY)


def tokens(outputs: list[Any]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@LONG
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
class TestLooker:
    """A tiny model that takes pictures."""

    def test_a_picture_in_a_message_is_seen_and_counts(self, looker: VllmEngine) -> None:
        """1. with a red picture, in a message, a hand-off or a piece of one, the answer is the same; without, another
        2. with a black one the model thinks something else; the picture's places count as tokens of the prompt
        """
        red, black = picture("red"), picture("black")
        prompt = looker._model.tokenizer.encode("what is this")
        whole = {"token_ids": prompt, "multi_modal_data": {"image": red}}
        handed = replace(ask("handed"), inputs={}, payloads={0: whole})
        pieces = {0: {"pieces": [{"token_ids": prompt[:2]}, {**whole, "token_ids": prompt[2:]}]}}
        said = run(
            looker,
            ask("none", TEXT),
            replace(ask("red", shown({"url": data_url(red)}), TEXT), next_stages=(1,)),
            replace(ask("black", shown({"url": data_url(black)}), TEXT), next_stages=(1,)),
            ask("again", TEXT, shown(data_url(red))),
            handed,
            replace(handed, key="pieces", payloads=pieces),
        )
        for key in ("again", "handed", "pieces"):
            assert tokens(said[key]) == tokens(said["red"]) != tokens(said["none"])
        handoffs: list[Any] = [said[key][-1].handoff for key in ("red", "black")]
        states = [handoff["hidden_states"][: len(prompt)] for handoff in handoffs]
        assert (states[0] - states[1]).abs().max() > 1e-3
        assert said["none"][-1].usage["prompt_tokens"] == len(prompt)
        assert said["red"][-1].usage["prompt_tokens"] == len(prompt) + IMAGE_TOKENS

    async def test_a_picture_that_comes_over_http_is_seen_the_same(self, looker: VllmEngine) -> None:
        document = "stages: [{stage_id: 0, engine: vllm, model: m, final_output: text}]"
        seen = run(looker, ask("direct", shown({"url": data_url(picture("red"))}), TEXT))["direct"]
        with LocalReplica(HUBS, engine=looker) as replica:
            async with hub_of(document, replica) as omni:
                transport = httpx.ASGITransport(app=build_app(omni, deploy_of(document), 0))
                async with httpx.AsyncClient(transport=transport, base_url="http://hub/v1") as client:
                    body = {**message(shown({"url": data_url(picture("red"))}), TEXT), "sampling_params_list": [GREEDY]}
                    answer = (await client.post("/chat/completions", json=body)).json()
                    two = await client.post("/chat/completions", json=message(*[shown(data_url(picture("red")))] * 2))
        assert answer["choices"][0]["message"]["content"] == "".join(output.text for output in seen)
        assert answer["usage"]["prompt_tokens"] == seen[-1].usage["prompt_tokens"]
        assert two.status_code == 400
        assert "stage 0 " in two.json()["error"]["message"]

    async def test_through_vllms_server_it_is_answered_as_vllm_itself_does(self, looker: VllmEngine) -> None:
        """Same words, and the same prompt, for a picture that is turned and in part transparent, whole and streamed."""
        skip_without_vllms_server()
        from vllm import SamplingParams
        from vllm.multimodal.media.image import ImageMediaIO

        from hub.api.vllm.server import VllmFrontend

        stage = msgspec.structs.replace(looker._stage, final_output="text", default_sampling_params={})
        frontend = VllmFrontend(DeployConfig(stages=(stage,), model="m"), "--chat-template-content-format openai")
        url = data_url(unusual_picture())
        file = ImageMediaIO().load_bytes(base64.b64decode(url.partition(",")[2]))
        prompt = {
            "prompt_token_ids": looker._model.tokenizer.encode("what is this"),
            "multi_modal_data": {"image": file},
        }
        looker._llm.add_request("itself", prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        while looker._llm.has_unfinished_requests():
            (itself,) = looker._llm.step() or [None]
        document = "stages: [{stage_id: 0, engine: vllm, model: m, final_output: text}]"
        with LocalReplica(HUBS, engine=looker) as replica:
            async with hub_of(document, replica) as omni:
                transport = httpx.ASGITransport(app=await frontend.build(omni))
                async with httpx.AsyncClient(transport=transport, base_url="http://hub/v1") as client:
                    more = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
                    body = {**message(shown({"url": url}), TEXT), "model": "m", **more}
                    answer = (await client.post("/chat/completions", json=body)).json()
                    alike = {**body, "n": 2, "temperature": 1, "top_k": 1}
                    several = (await client.post("/chat/completions", json=alike)).json()
                    likely = (await client.post("/chat/completions", json={**body, "prompt_logprobs": 0})).json()
                    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
                    streamed = (await client.post("/chat/completions", json=streaming)).text
        said = itself.outputs[0]
        for choice in (*answer["choices"], *several["choices"]):
            assert (choice["message"]["content"], choice["token_ids"]) == (said.text, list(said.token_ids))
        assert answer["prompt_token_ids"] == several["prompt_token_ids"] == itself.prompt_token_ids
        assert answer["usage"]["prompt_tokens"] == len(itself.prompt_token_ids) == 5 + IMAGE_TOKENS
        assert len(likely["prompt_logprobs"]) == len(itself.prompt_token_ids)
        events = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n") if "{" in line]
        assert answer["usage"] == {**answer["usage"], **events[-1]["usage"]}
        assert events[0]["prompt_token_ids"] == itself.prompt_token_ids
        assert "".join(event["choices"][0]["delta"]["content"] for event in events[:-1]) == said.text

    def test_hidden_states_have_a_row_for_the_pictures_places(self, looker: VllmEngine) -> None:
        request = replace(ask("h", shown({"url": data_url(picture("red"))}), TEXT), next_stages=(1,))
        (last,) = run(looker, request)["h"][-1:]
        assert last.handoff is not None
        assert len(last.handoff["hidden_states"]) == last.usage["prompt_tokens"] + 12 - 1

    def test_an_answer_to_a_picture_is_paused_and_goes_on(self, looker: VllmEngine) -> None:
        request = ask("p", shown({"url": data_url(picture("red"))}), TEXT)
        whole = run(looker, request)["p"]
        looker.add(request)
        said = [*looker.step(), *looker.step(), *looker.step()]
        looker.pause("p", True)
        assert not looker.has_unfinished()
        looker.pause("p", False)
        said += drain(looker)
        assert tokens(said) == tokens(whole)
        assert said[-1].usage == whole[-1].usage

    @pytest.mark.attack("X3")
    def test_others_go_on_while_a_picture_of_many_pixels_is_prepared(self, looker: VllmEngine) -> None:
        """Of 60 KB, it is 54 million pixels. 1. no step takes half as long; 2. of its pixels, none are kept"""
        huge = ask("huge", shown({"url": data_url(picture("red", 7400))}), TEXT)
        began_s = time.monotonic()
        run(looker, huge)
        alone_s = time.monotonic() - began_s
        looker.add(replace(huge, key="again"))
        steps_s: list[float] = []
        said: dict[str, list[Any]] = {}
        while looker.has_unfinished():
            if not looker._runs:
                looker.add(ask(f"other {len(said)}", TEXT))
            began_s = time.monotonic()
            for output in looker.step():
                said.setdefault(output.key, []).append(output)
                if output.key == "again":
                    assert looker._answers.get("again") is None or not looker._answers["again"].prompt.items
            steps_s.append(time.monotonic() - began_s)
            if "again" in said and said["again"][-1].finish_reason:
                break
        drain(looker)
        assert len(tokens(said["again"])) == 12
        assert max(steps_s) < alone_s / 2
        assert len(said) > 2

    def test_more_or_other_items_than_the_model_takes_are_refused_and_the_engine_lives(
        self, looker: VllmEngine
    ) -> None:
        url = data_url(picture("red"))
        two = ask("two", shown(url), shown(url), TEXT)
        for asked, named in ((two, "image"), (replace(ask("s", shown(url), TEXT), segment=0), "segments")):
            (end,) = run(looker, asked)[asked.key]
            assert end.error is not None
            assert end.error[0] == FailureKind.INVALID
            assert named in end.error[1]
        for items in ({"audio": [1.0]}, {"image": "x"}):
            payloads = {0: {"token_ids": [30, 31], "multi_modal_data": items}}
            (end,) = run(looker, replace(ask("bad"), inputs={}, payloads=payloads))["bad"]
            assert end.error is not None
            assert end.error[0] == FailureKind.INVALID
        assert len(tokens(run(looker, ask("ok", TEXT))["ok"])) == 12
