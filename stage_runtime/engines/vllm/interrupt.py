"""Answers that are interrupted: begun by another replica, or held back while their next stages or client are behind.

vLLM can't pause one request. So the engine is made to forget it, and gets it again later as prompt and answer so far,
which its prefix cache makes cheap; meanwhile it needs no memory of the device. That is exact where an answer can be
continued elsewhere; what can't be goes on instead.
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


def can_pause(answer: Answer, model: Model) -> bool:
    """Whether nobody will notice; then the answer has what it takes to go on."""
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
    """Take over what another replica has shown; the end of the answer if nothing else comes behind that, else None.

    Raise NotResumableError if what would come is not sure to be exactly what that replica would have said.
    """
    resume, params = answer.request.resume, answer.params
    if resume is None:
        return None
    vllm_resume.check(params, model)
    if answer.prompt.embeds is not None and resume.token_ids:
        raise vllm_resume.refusal("prompt_embeds")
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
    """The prompt and the sampling parameters of what is left to say. Raise InvalidRequestError as ``ask`` does."""
    params = answer.params.clone()
    prompt_logprobs.ask(params, answer)
    if answer.detokenizer is not None:
        vllm_resume.shorten(params, len(answer.token_ids))
    return answer.prompt.with_answer(answer.token_ids), params
