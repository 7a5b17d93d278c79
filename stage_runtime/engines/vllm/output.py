"""What vLLM says of an answer, in plain values: text, tokens, and how likely they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from omni_discovery.wire import TokenLogprob, TokenLogprobs
from stage_runtime.engines.base import EngineOutput
from stage_runtime.engines.vllm.handoff import Answer
from stage_runtime.engines.vllm.load import Model

#: What a tokenizer makes of bytes that are no whole character.
_BROKEN: Final = "\ufffd"
#: How many tokens before the one that ends a character may hold a part of it: it has four bytes at most.
_PARTS: Final = 3


def new_output(
    answer: Answer, made: Any, token_ids: tuple[int, ...], finish_reason: str | None, model: Model
) -> EngineOutput:
    """What is new of an answer, whose ``token_ids`` have the new ones at their end; its text is kept there, too.

    ``made`` is vLLM's RequestOutput.
    """
    piece = made.outputs[0]
    text = piece.text if answer.detokenizer is None else answer.detokenizer.text_of(token_ids, finish_reason)
    answer.texts.append(text)
    logprobs = plain_logprobs(piece.logprobs, answer.token_ids, len(token_ids), model.tokenizer)
    # Of the prompt's first token, which nothing comes before, vLLM says None.
    of_prompt = (made.prompt_logprobs or ())[1:]
    # Another replica may have told it already, or this one before a pause.
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
    """What vLLM made for the ``new`` last of these tokens; nothing where it was not asked."""
    if not made:
        return ()
    first = len(token_ids) - new
    places = []
    for number, place in enumerate(made, first):
        earlier = token_ids[max(0, number - _PARTS) : number]
        places.append(tuple(_plain(int(token_id), each, earlier, tokenizer) for token_id, each in place.items()))
    return tuple(places)


def text_alone(token_id: int, earlier: Sequence[int], tokenizer: Any) -> str:
    """What a token says behind others: the whole character if it ends one, nothing if it leaves one open."""
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
    # vLLM names tokens where it makes the text; of an answer that was interrupted, or begun elsewhere, it does not.
    text = each.decoded_token if each.decoded_token is not None else text_alone(token_id, earlier, tokenizer)
    return TokenLogprob(token_id, float(each.logprob), int(each.rank or 0), str(text))
