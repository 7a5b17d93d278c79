"""The vocoder: a function of its tokens, whatever pieces they come in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from omni_discovery.deploy.document import StageConfig
from omni_discovery.deploy.load import load_deploy
from stage_runtime.demo.code2wav import AFTER, BLOCK, HOP, RATE_HZ, SpeechStream, Vocoder
from stage_runtime.demo.speaking import SpeakingDemo
from stage_runtime.engines.base import StageRequest, create_engine
from stage_runtime.engines.callable.engine import TorchEngine
from stage_runtime.testing import run

DEPLOY = SpeakingDemo.deploy
FIRST = 640


def vocoder_stage() -> StageConfig:
    stage = load_deploy(DEPLOY).stages[3]
    assert stage.engine == "torch"
    return stage


@pytest.fixture(scope="module")
def vocoder() -> Vocoder:
    threads = torch.get_num_threads()
    made = Vocoder(str(DEPLOY.parent / "vocoder"))
    torch.set_num_threads(threads)
    return made


@torch.no_grad()
def sound_of(vocoder: Vocoder, pieces: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    speech = SpeechStream(vocoder.model)
    blocks = [block for piece in pieces for block in speech.add(piece)]
    return [*blocks, *speech.end()]


CODES = [(37 * place) % 512 for place in range(43)]


@pytest.mark.parametrize("size", [1, 4, 7, 16, 43])
def test_the_samples_are_the_same_in_whatever_pieces_the_codes_come(vocoder: Vocoder, size: int) -> None:
    whole = torch.cat(sound_of(vocoder, [CODES]))
    pieces = [CODES[start : start + size] for start in range(0, len(CODES), size)]
    assert torch.equal(torch.cat(sound_of(vocoder, pieces)), whole)
    assert whole.abs().max() > 0.01


def test_a_block_comes_as_soon_as_its_codes_and_two_more_are_there(vocoder: Vocoder) -> None:
    with torch.no_grad():
        speech = SpeechStream(vocoder.model)
        assert list(speech.add(CODES[: BLOCK + AFTER - 1])) == []
        (block,) = speech.add(CODES[BLOCK + AFTER - 1 : BLOCK + AFTER])
    assert block.shape == (BLOCK * HOP,)
    assert BLOCK * HOP == RATE_HZ // 10, "a tenth of a second"


def test_every_code_is_heard_and_what_is_before_does_not_change_by_what_comes(vocoder: Vocoder) -> None:
    whole = torch.cat(sound_of(vocoder, [CODES]))
    assert len(whole) == -(-len(CODES) // BLOCK) * BLOCK * HOP
    other = torch.cat(sound_of(vocoder, [[*CODES[:30], *(5 for _ in CODES[30:])]]))
    assert torch.equal(whole[: (30 - AFTER) // BLOCK * BLOCK * HOP], other[: (30 - AFTER) // BLOCK * BLOCK * HOP])
    assert not torch.equal(whole, other)
    assert sound_of(vocoder, [[]]) == []


def test_as_a_stage_it_passes_over_tokens_that_are_no_codes() -> None:
    engine = create_engine(vocoder_stage())
    assert isinstance(engine, TorchEngine)
    threads = torch.get_num_threads()
    engine.load(lambda _phase, _progress: None)
    torch.set_num_threads(threads)

    def sound(token_ids: list[int]) -> list[bytes | None]:
        handed = {"token_ids": torch.tensor(token_ids, dtype=torch.int64), "text": ""}
        request = StageRequest("k", "k", payloads={2: handed})
        return [output.audio_wav for output in run(engine, request)["k"] if output.audio_wav]

    codes = [FIRST + code for code in CODES]
    assert sound([3, *codes, FIRST + 512]) == sound(codes)
    assert len(sound(codes)) == 9
    engine.close()
