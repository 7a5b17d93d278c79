"""The thinker's tokenizer: a small byte-level BPE made for questions about sums.

It lowers the case, folds whitespace, and splits digits one by one, so a number looks the same wherever it stands.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stage_runtime.demo.training.junk import refusable
from stage_runtime.demo.training.questions import ThinkerAnswer, training_question

VOCAB_SIZE = 640
CORPUS_SEED = 7
CORPUS_QUESTIONS = 20_000
CONTEXT_TOKENS = 256

PAD = "<|pad|>"
END = "<|end|>"
#: Stands between the question and the answer.
ANSWER = "<|answer|>"
PAINT = "<|paint|>"
DIGITS = tuple(f"<|d{digit}|>" for digit in range(10))
SPECIAL_TOKENS = (PAD, END, ANSWER, PAINT, *DIGITS)

# Only the last user message counts. A user who types a special token gets its letters, never the token.
CHAT_TEMPLATE = """\
{%- set last = namespace(text="") -%}
{%- for message in messages if message["role"] == "user" -%}
  {%- if message["content"] is string -%}
    {%- set last.text = message["content"] -%}
  {%- else -%}
    {%- set texts = message["content"] | selectattr("type", "equalto", "text") -%}
    {%- set last.text = texts | map(attribute="text") | join(" ") -%}
  {%- endif -%}
{%- endfor -%}
{{- last.text | replace("<|", "< |") -}}<|answer|>"""


def prompt(question: str) -> str:
    """Return what the chat template makes of one user message."""
    return question.replace("<|", "< |") + ANSWER


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on its own fixed-seed questions and the answers to them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?\p{L}+| ?[^\s\p{L}\d]+ ?|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Trained before the normalizer is set: the answers keep their capitals.
    backend.train_from_iterator(_corpus(), trainer)
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"(?<=[a-z])-(?=[a-z])"), " "),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
            # Every word then starts with a space, the first one too, and has one token less to learn.
            normalizers.Prepend(" "),
        ]
    )
    make: Any = PreTrainedTokenizerFast  # transformers leaves its constructors untyped
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[ANSWER, PAINT, *DIGITS],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
    )
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, the chat template inside, for any recent transformers."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    file = folder / "tokenizer_config.json"
    fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    # The name that both transformers 4 and 5 know; which tokens are special stands in tokenizer.json.
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    fields.pop("extra_special_tokens", None)
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _corpus() -> Iterator[str]:
    rng = random.Random(CORPUS_SEED)
    for _ in range(CORPUS_QUESTIONS):
        question = training_question(rng, refusable)
        yield " " + " ".join(question.text.lower().replace("-", " - ").split())
        yield question.answer.text


class AnswerEncoder:
    """Turns answers into token ids, capitals and all, which the tokenizer itself would lower."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Copy the tokenizer's vocabulary; the tokenizer stays as it is."""
        self._raw = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._raw.normalizer = normalizers.Sequence([])

    def encode(self, answer: ThinkerAnswer) -> list[int]:
        """Return the ids of the text, the paint tokens where there are digits, and the end."""
        marks = PAINT + "".join(DIGITS[int(digit)] for digit in answer.digits) if answer.digits else ""
        ids: list[int] = self._raw.encode(answer.text + marks + END).ids
        return ids
