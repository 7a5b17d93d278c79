"""vLLM's outputs in plain values: text, tokens and log probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from omni_discovery.wire import TokenLogprob, TokenLogprobs
from stage_runtime.engines.base import EngineOutput
from stage_runtime.engines.vllm.handoff import Answer
from stage_runtime.engines.vllm.load import Model

#: The replacement character: a tokenizer's text for bytes that are no complete character.
_BROKEN: Final = "\ufffd"
#: How many tokens before the one that ends a character may hold a part of it: it has four bytes at most.
_PARTS: Final = 3


def new_output(
    answer: Answer, made: Any, token_ids: tuple[int, ...], finish_reason: str | None, model: Model
) -> EngineOutput:
    """The new part of an answer, out of ``made``, vLLM's RequestOutput. Appends the new text to ``answer.texts``.

    ``token_ids`` are the new tokens; ``answer.token_ids`` has them at its end already.
    """
    piece = made.outputs[0]
    text = piece.text if answer.detokenizer is None else answer.detokenizer.text_of(token_ids, finish_reason)
    answer.texts.append(text)
    logprobs = plain_logprobs(piece.logprobs, answer.token_ids, len(token_ids), model.tokenizer)
    # vLLM has None for the prompt's first token, which nothing comes before.
    of_prompt = (made.prompt_logprobs or ())[1:]
    # False after a pause, and if another replica has put out the beginning: then the prompt was put out, too.
    is_first = answer.prompt.items is not None and len(answer.token_ids) == len(token_ids)
    return EngineOutput(
        answer.request.key,
        text=text,
        token_ids=token_ids,
        finish_reason=finish_reason,
        logprobs=logprobs,
        prompt_logprobs=plain_logprobs(of_prompt, made.prompt_token_ids, len(of_prompt), model.tokenizer),
        prompt_token_ids=tuple(map(int, made.prompt_token_ids)) if is_first else (),
        stop_reason=piece.stop_reason,
    )


def plain_logprobs(
    made: Sequence[Mapping[int, Any]] | None, token_ids: Sequence[int], new: int, tokenizer: Any
) -> tuple[TokenLogprobs, ...]:
    """The log probabilities of the ``new`` last of these tokens, one entry each; empty if the request has none."""
    if not made:
        return ()
    first = len(token_ids) - new
    places = []
    for number, place in enumerate(made, first):
        earlier = token_ids[max(0, number - _PARTS) : number]
        places.append(tuple(_plain(int(token_id), each, earlier, tokenizer) for token_id, each in place.items()))
    return tuple(places)


def text_alone(token_id: int, earlier: Sequence[int], tokenizer: Any) -> str:
    """The text of a token behind others: a whole character if it ends one, empty if it leaves one incomplete."""
    from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

    (alone,) = convert_ids_list_to_tokens(tokenizer, [token_id])
    for count in range(1, len(earlier) + 1):
        if not alone.endswith(_BROKEN):
            break
        context = list(earlier[-count:])
        whole = str(tokenizer.decode([*context, token_id]))
        alone = whole.removeprefix(tokenizer.decode(context).rstrip(_BROKEN))
    return "" if alone.endswith(_BROKEN) else str(alone)


def _plain(token_id: int, each: Any, earlier: Sequence[int], tokenizer: Any) -> TokenLogprob:
    # vLLM decodes tokens only if it makes the text; not for an answer that was paused or begun by another replica.
    text = each.decoded_token if each.decoded_token is not None else text_alone(token_id, earlier, tokenizer)
    return TokenLogprob(token_id, float(each.logprob), int(each.rank or 0), str(text))
