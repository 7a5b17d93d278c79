"""How well the thinker answers: held-out sums, numbers to draw, and what it must refuse."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stage_runtime.demo.training.junk import refusable, unseen_noise, unseen_text
from stage_runtime.demo.training.questions import (
    LARGEST,
    REFUSED,
    Operation,
    Question,
    ask_draw,
    ask_sum,
    held_out_questions,
    random_pair,
)
from stage_runtime.demo.training.thinker_tokenizer import AnswerEncoder, prompt

SEED = 99
ROUNDS = 3
MAX_NEW_TOKENS = 48
#: Longest question put to the thinker: what its context leaves beside the answer.
MAX_PROMPT_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Score:
    """How many of a group of questions were answered exactly, text and paint tokens both."""

    asked: int
    exact: int
    #: A few of the wrong ones, as "question -> what came".
    wrong: tuple[str, ...]

    @property
    def share(self) -> float:
        """The share answered exactly, 0 to 1."""
        return self.exact / self.asked


class Thinker:
    """The trained thinker under transformers, decoding greedily in single precision."""

    def __init__(self, folder: Path) -> None:
        """Load the model and its tokenizer from a folder."""
        # transformers' own types are too wide here: any tokenizer, any model.
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = tokenizer
        self._model = model.eval()
        self._encoder = AnswerEncoder(tokenizer)

    def score(self, questions: Sequence[Question]) -> Score:
        """Ask all questions and compare token by token with the right answers."""
        asked = [self._tokenizer(prompt(question.text))["input_ids"] for question in questions]
        # Batches of one length each need no padding, and so no mask that could colour the result.
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(asked):
            if len(ids) <= MAX_PROMPT_TOKENS:
                by_length.setdefault(len(ids), []).append(index)
        wrong, exact = [], 0
        for indices in by_length.values():
            for index, came in zip(indices, self._complete([asked[i] for i in indices]), strict=True):
                if came == self._encoder.encode(questions[index].answer):
                    exact += 1
                else:
                    wrong.append(f"{questions[index].text} -> {self._tokenizer.decode(came)}")
        return Score(sum(map(len, by_length.values())), exact, tuple(wrong[:12]))

    @torch.no_grad()
    def _complete(self, prompts: list[list[int]]) -> list[list[int]]:
        inputs = torch.tensor(prompts)
        output = self._model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        end = self._tokenizer.eos_token_id
        rows = output[:, inputs.shape[1] :].tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows]


def score_thinker(folder: Path) -> dict[str, Score]:
    """Return the score of each group of questions, by the group's name."""
    thinker = Thinker(folder)
    return {name: thinker.score(questions) for name, questions in question_groups().items()}


def question_groups() -> dict[str, list[Question]]:
    """Return the questions of the evaluation, by the group's name; the same on every call."""
    rng = random.Random(SEED)
    held_out = {
        operation: [question for _ in range(ROUNDS) for question in held_out_questions(operation, rng)]
        for operation in Operation
    }
    seen = [ask_sum(*random_pair_of(operation, rng), rng) for operation in Operation for _ in range(1000)]
    return {
        "held-out additions": [q for q in held_out[Operation.ADD] if q.answer != REFUSED],
        "held-out subtractions": [q for q in held_out[Operation.SUBTRACT] if q.answer != REFUSED],
        "held-out pairs to refuse": [q for group in held_out.values() for q in group if q.answer == REFUSED],
        "seen pairs": seen,
        "numbers to draw": [ask_draw(number, rng) for number in range(LARGEST + 1) for _ in range(5)],
        "seen kinds to refuse": [Question(refusable(rng), REFUSED) for _ in range(2000)],
        "unseen texts to refuse": [Question(unseen_text(rng), REFUSED) for _ in range(1500)],
        "unseen noise to refuse": [Question(unseen_noise(rng), REFUSED) for _ in range(1500)],
    }


def random_pair_of(operation: Operation, rng: random.Random) -> tuple[int, Operation, int]:
    """Return a pair that training may hold, with the operation between."""
    first, second = random_pair(operation, rng)
    return first, operation, second
