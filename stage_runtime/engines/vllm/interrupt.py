"""Interrupted answers: begun by another replica, or paused while their next stages or their client are behind.

vLLM can't pause one request. So its run is aborted, and started again later with the prompt and the answer so far,
which the prefix cache makes cheap; meanwhile the request needs no memory of the device. That is exact for an answer
that another replica could continue; any other is not paused.
"""

from __future__ import annotations

from typing import Any

from omni_discovery.wire import Resume
from stage_runtime.config import NotResumableError
from stage_runtime.engines.base import EngineOutput
from stage_runtime.engines.vllm import prompt_logprobs
from stage_runtime.engines.vllm import resume as vllm_resume
from stage_runtime.engines.vllm.handoff import Answer
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.sampling_params import are_known


def can_pause(answer: Answer, model: Model) -> bool:
    """Whether the answer can be paused and continued exactly; prepares its detokenizer if it can."""
    if not answer.token_ids:
        return True
    try:
        vllm_resume.check(answer.params, model)
        if answer.prompt.embeds is not None:
            return False
        if answer.detokenizer is None:
            detokenizer = vllm_resume.ResumableDetokenizer(
                answer.request.key, answer.prompt.token_ids, answer.params, model
            )
            detokenizer.replay(Resume(token_ids=tuple(answer.token_ids), text=answer.text), stopped=False)
            answer.detokenizer = detokenizer
    except NotResumableError:
        return False
    return True


def take_over(answer: Answer, model: Model) -> EngineOutput | None:
    """Make what another replica has shown the beginning of the answer; the end if the answer is complete, else None.

    Raise NotResumableError if the rest is not sure to be exactly what that replica would have generated.
    """
    resume, params = answer.request.resume, answer.params
    if resume is None:
        return None
    vllm_resume.check(params, model)
    if answer.prompt.embeds is not None and resume.token_ids:
        raise vllm_resume.refusal("prompt_embeds")
    if len(answer.prompt) + len(resume.token_ids) > model.max_model_len:
        raise vllm_resume.refusal("other prompt")
    if resume.token_ids and not are_known(resume.token_ids, model.vocab_size):
        raise vllm_resume.refusal("other text")
    answer.token_ids += resume.token_ids
    answer.texts.append(resume.text)
    ended = vllm_resume.end_of(resume.token_ids, len(answer.prompt), params, model)
    if ended is not None and params.skip_reading_prefix_cache:
        raise vllm_resume.refusal("hidden_states")
    answer.detokenizer = vllm_resume.ResumableDetokenizer(answer.request.key, answer.prompt.token_ids, params, model)
    answer.detokenizer.replay(resume, stopped=ended == "stop")
    if ended is None:
        return None
    stop_reason = vllm_resume.stop_reason_of(resume.token_ids, params, model) if ended == "stop" else None
    return EngineOutput(answer.request.key, finish_reason=ended, stop_reason=stop_reason)


def rest_of(answer: Answer) -> tuple[dict[str, Any], Any]:
    """The prompt and sampling parameters for the rest of an answer. Raise InvalidRequestError as ``ask`` does."""
    params = answer.params.clone()
    prompt_logprobs.ask(params, answer)
    if answer.detokenizer is not None:
        vllm_resume.shorten(params, len(answer.token_ids))
    return answer.prompt.with_answer(answer.token_ids), params
