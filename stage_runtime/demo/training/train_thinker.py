"""Train the thinker: `python -m stage_runtime.demo.training.train_thinker`, then once more with `--polish`.

A quarter of an hour on one core, and ten minutes more for the polish.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stage_runtime.demo.training.junk import refusable
from stage_runtime.demo.training.questions import training_question
from stage_runtime.demo.training.steps import TrainingSteps
from stage_runtime.demo.training.thinker_tokenizer import (
    CONTEXT_TOKENS,
    AnswerEncoder,
    build_tokenizer,
    prompt,
    save_tokenizer,
)

THINKER_FOLDER = Path(__file__).parents[1] / "thinker"
_IGNORED = -100

#: The token ids of a question and of its answer.
Pair = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to train."""

    steps: int
    #: A batch holds at most so many questions and so many tokens, padding included.
    batch: int = 256
    batch_tokens: int = 9_000
    warmup_steps: int = 100
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    seed: int = 11
    #: Batches drawn at once and sorted by length, so that little of a batch is padding.
    pool_batches: int = 32


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return the untrained thinker, or talker: a Llama decoder of 0.7 million parameters, or 0.8 with codes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_bias=True,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    make: Any = LlamaForCausalLM  # transformers leaves its constructors untyped
    model: LlamaForCausalLM = make(config)
    return model


def batches(tokenizer: PreTrainedTokenizerFast, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (token ids, labels) for ever, padded on the right; only answers are labelled."""
    rng = random.Random(plan.seed)
    encoder = AnswerEncoder(tokenizer)
    while True:
        questions = [training_question(rng, refusable) for _ in range(plan.batch * plan.pool_batches)]
        asked = tokenizer([prompt(question.text) for question in questions])["input_ids"]
        pairs = [(ids, encoder.encode(question.answer)) for ids, question in zip(asked, questions, strict=True)]
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        chunks = list(_chunks(pairs, plan))
        rng.shuffle(chunks)
        for chunk in chunks:
            yield pad_pairs(chunk, tokenizer.pad_token_id)


def _chunks(pairs: list[Pair], plan: Plan) -> Iterator[list[Pair]]:
    start = 0
    for end in range(1, len(pairs) + 1):
        # Sorted by length: the next pair would be the widest and set the width of them all.
        width = len(pairs[end][0]) + len(pairs[end][1]) if end < len(pairs) else 0
        if end == len(pairs) or end - start == plan.batch or (end - start + 1) * width > plan.batch_tokens:
            yield pairs[start:end]
            start = end


def pad_pairs(pairs: list[Pair], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return token ids, padded on the right, and labels: of each answer's place, the token that follows."""
    width = max(len(asked) + len(answer) for asked, answer in pairs)
    inputs = torch.full((len(pairs), width), pad_token_id)
    labels = torch.full((len(pairs), width), _IGNORED)
    for row, (asked, answer) in enumerate(pairs):
        end = len(asked) + len(answer)
        inputs[row, :end] = torch.tensor(asked + answer)
        # A position is labelled with the token that follows it.
        labels[row, len(asked) - 1 : end - 1] = torch.tensor(answer)
    return inputs, labels


def answer_loss(model: LlamaForCausalLM, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of the answer tokens; logits are made for those only."""
    # Padding is on the right, where the causal mask alone keeps it out of sight.
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    places = (labels.flatten() != _IGNORED).nonzero().squeeze(1)
    logits = model.lm_head(hidden.flatten(0, 1).index_select(0, places))
    return functional.cross_entropy(logits.float(), labels.flatten()[places])


def train(model: LlamaForCausalLM, examples: Iterator[tuple[Tensor, Tensor]], plan: Plan) -> None:
    """Train in place on (token ids, labels): Muon for the matrices, Adam for embeddings, norms and biases."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=plan.other_rate, weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _rate(step, plan)) for o in optimizers]
    # The fused attention of torch is slower than the plain one here: its backward on a CPU takes half of a step.
    model.set_attn_implementation("eager")
    model.train()
    with TrainingSteps(plan.steps, every=50) as shown:
        for step, (inputs, labels) in zip(range(1, plan.steps + 1), examples, strict=False):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = answer_loss(model, inputs, labels)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            shown.done(step, loss=loss.item())


def _rate(step: int, plan: Plan) -> float:
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    # Full speed for a third of the way, then straight down to nearly nothing.
    left = (plan.steps - step) / (0.67 * plan.steps)
    return max(0.01, min(1.0, left))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a folder that transformers and vLLM load, weights in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig.from_dict(
        {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "do_sample": False}
    )
    halved: Any = model.half  # untyped too
    halved().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, folder)


def main() -> None:
    """Read the arguments, train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--out", type=Path, default=THINKER_FOLDER)
    parser.add_argument("--polish", type=Path, help="go on from the thinker in this folder, slowly, with new questions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    plan = Plan(steps=arguments.steps)
    model = build_model(tokenizer, plan.seed)
    if arguments.polish is not None:
        plan = Plan(steps=arguments.steps, matrix_rate=0.01, other_rate=1.5e-3, seed=12)
        halved = load_file(arguments.polish / "model.safetensors")
        # The output weights are the embedding's, so the file holds them once.
        model.load_state_dict({name: tensor.float() for name, tensor in halved.items()}, strict=False)
    train(model, batches(tokenizer, plan), plan)
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
