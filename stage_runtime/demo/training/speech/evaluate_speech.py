"""How well spoken answers are understood: `python -m stage_runtime.demo.training.speech.evaluate_speech`.

Held-out sums go through thinker, talker and vocoder; a recogniser that knows espeak-ng alone tells which of the 200
sentences it hears. The figures go into `evaluation.json`, beside those of the first demo.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from stage_runtime.demo.code2wav import SpeechStream, Vocoder
from stage_runtime.demo.training.evaluate import RESULT_FILE
from stage_runtime.demo.training.questions import REFUSED, Operation, held_out_questions
from stage_runtime.demo.training.speech.codec import CODEBOOK, CODES, encode_corpus
from stage_runtime.demo.training.speech.corpus import speak_corpus
from stage_runtime.demo.training.speech.recogniser import load_or_train, share_right
from stage_runtime.demo.training.speech.sentences import spoken
from stage_runtime.demo.training.speech.train_talker import TALKER_FOLDER
from stage_runtime.demo.training.speech.train_vocoder import VOCODER_FOLDER
from stage_runtime.demo.training.thinker_tokenizer import VOCAB_SIZE, prompt
from stage_runtime.demo.training.train_thinker import THINKER_FOLDER

_SEED: Final = 99
_BATCH: Final = 64


@torch.no_grad()
def complete(folder: Path, prompts: Sequence[list[int]], longest: int) -> list[list[int]]:
    """What a model says to each prompt, greedily and in single precision, its end token with it."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    end = loaded.config.eos_token_id
    said: list[list[int]] = [[] for _ in prompts]
    # Batches of one length each need no padding.
    by_length: dict[int, list[int]] = {}
    for number, ids in enumerate(prompts):
        by_length.setdefault(len(ids), []).append(number)
    for numbers in by_length.values():
        for start in range(0, len(numbers), _BATCH):
            some = numbers[start : start + _BATCH]
            inputs = torch.tensor([prompts[number] for number in some])
            made = loaded.eval().generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=longest, do_sample=False
            )
            for number, row in zip(some, made[:, inputs.shape[1] :].tolist(), strict=True):
                said[number] = row[: row.index(end) + 1] if end in row else row
    return said


@torch.no_grad()
def sound_of(vocoder: Vocoder, codes: Sequence[int]) -> Tensor:
    """The samples that the vocoder makes of codes."""
    speech = SpeechStream(vocoder.model)
    blocks = [*speech.add(codes), *speech.end()]
    return torch.cat(blocks) if blocks else torch.zeros(1600)


def score_speech(recogniser_file: Path | None) -> dict[str, Any]:
    """The figures, by name."""
    rng = random.Random(_SEED)
    questions = [
        question
        for operation in Operation
        for question in held_out_questions(operation, rng)
        if question.answer != REFUSED
    ]
    wanted = [spoken(question.answer.text) for question in questions]
    tokenizer: Any = AutoTokenizer.from_pretrained(THINKER_FOLDER)
    thought = complete(THINKER_FOLDER, [tokenizer(prompt(each.text))["input_ids"] for each in questions], 48)
    said = complete(TALKER_FOLDER, thought, 200)
    heard_codes = [[token - VOCAB_SIZE for token in row if 0 <= token - VOCAB_SIZE < CODES] for row in said]
    corpus = speak_corpus()
    codes = {each.words: row.tolist() for each, row in zip(corpus, encode_corpus(corpus, CODEBOOK), strict=True)}
    recogniser, vocoder = load_or_train(recogniser_file), Vocoder(str(VOCODER_FOLDER))
    real = [each.words for each in corpus]
    return {
        "sentences": len(corpus),
        "espeak_recognised": share_right(recogniser, real, [each.sound for each in corpus]),
        "vocoder_recognised": share_right(recogniser, real, [sound_of(vocoder, codes[words]) for words in real]),
        "held_out_sums": len(questions),
        "held_out_codes_as_espeaks": sum(row == codes[words] for row, words in zip(heard_codes, wanted, strict=True))
        / len(questions),
        "held_out_recognised": share_right(recogniser, wanted, [sound_of(vocoder, row) for row in heard_codes]),
    }


def main() -> None:
    """Read the arguments, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recogniser", type=Path, help="file that keeps the recogniser; default: it is trained anew")
    parser.add_argument("--out", type=Path, default=RESULT_FILE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    score = {name: round(value, 5) for name, value in score_speech(arguments.recogniser).items()}
    for name, value in score.items():
        print(f"{name.replace('_', ' ')}: {value}")
    figures = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    arguments.out.write_text(
        json.dumps({**figures, "speech": score}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
