"""Train the talker, which reads an answer aloud in codes: `python -m stage_runtime.demo.training.speech.train_talker`.

Its vocabulary is the thinker's, the codes behind that, and an end. Its prompt is all that the thinker hands over.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from stage_runtime.demo.training.speech.codec import CODEBOOK, CODES, encode_corpus
from stage_runtime.demo.training.speech.corpus import speak_corpus
from stage_runtime.demo.training.speech.sentences import any_answer, spoken
from stage_runtime.demo.training.thinker_tokenizer import CONTEXT_TOKENS, AnswerEncoder, build_tokenizer
from stage_runtime.demo.training.train_thinker import Plan, build_model, pad_pairs, save, train

TALKER_FOLDER: Final = Path(__file__).parents[2] / "talker"
END: Final = "<|silent|>"
_SEED: Final = 47
#: The share of codes that the talker reads wrong while it learns, so that one mistake of its own leads to no other.
_MISREAD: Final = 0.03


def name_of(code: int) -> str:
    """The token of a code."""
    return f"<|s{code}|>"


def talker_tokenizer() -> PreTrainedTokenizerFast:
    """The thinker's tokenizer, with a token for each code and the end behind its own."""
    tokenizer = build_tokenizer()
    names = [name_of(code) for code in range(CODES)]
    tokenizer.add_tokens(
        [AddedToken(name, special=True, normalized=False) for name in (*names, END)], special_tokens=True
    )
    tokenizer.eos_token = END
    tokenizer.chat_template = None
    tokenizer.model_max_length = CONTEXT_TOKENS
    return tokenizer


def batches(
    thinker_tokens: AnswerEncoder,
    codes: dict[tuple[str, ...], list[int]],
    plan: Plan,
    tokenizer: PreTrainedTokenizerFast,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (token ids, labels) for ever: what the thinker hands over, and the tokens of its sentence."""
    rng = random.Random(plan.seed)
    chance = torch.Generator().manual_seed(plan.seed)
    first = len(tokenizer) - CODES - 1
    while True:
        answers = [any_answer(rng) for _ in range(plan.batch)]
        pairs = [(thinker_tokens.encode(answer), codes[spoken(answer.text)]) for answer in answers]
        said = [[*(first + code for code in code_row), tokenizer.eos_token_id] for _, code_row in pairs]
        inputs, labels = pad_pairs(
            [(asked, tokens) for (asked, _), tokens in zip(pairs, said, strict=True)], tokenizer.pad_token_id
        )
        is_code = (inputs >= first) & (inputs < first + CODES)
        misread = is_code & (torch.rand(inputs.shape, generator=chance) < _MISREAD)
        yield torch.where(misread, torch.randint(first, first + CODES, inputs.shape, generator=chance), inputs), labels


def main() -> None:
    """Read the arguments, train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=TALKER_FOLDER)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = talker_tokenizer()
    plan = Plan(steps=arguments.steps, batch=48, warmup_steps=40, seed=_SEED)
    corpus = speak_corpus()
    codes = {each.words: row.tolist() for each, row in zip(corpus, encode_corpus(corpus, CODEBOOK), strict=True)}
    model = build_model(tokenizer, plan.seed)
    train(model, batches(AnswerEncoder(build_tokenizer()), codes, plan, tokenizer), plan)
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
