"""vLLM in the replica's own process, stepped by the thread that owns it.

No process of vLLM's own stands between: engine, process and lease live and die together. The same code runs vLLM's CPU
and GPU builds; ``engine_args`` go to vLLM as they are, but for ``handoff`` and ``allow_rpc``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from omni_discovery.deploy import StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import FailureKind, Resume
from stage_runtime.engines import vllm_resume
from stage_runtime.engines.base import EngineOutput, Report, StageRequest, check_model_folder, checked_args
from stage_runtime.engines.prompts import read_prompt
from stage_runtime.engines.rendezvous import rendezvous_removed
from stage_runtime.engines.sampling import token_sampling
from stage_runtime.engines.vllm_args import engine_args_of
from stage_runtime.engines.vllm_control import vllm_controls
from stage_runtime.engines.vllm_params import check_prompt, sampling_params
from stage_runtime.engines.vllm_pd import PrefillDecode
from stage_runtime.engines.vllm_resume import NOT_RESUMABLE, Model, Wording
from stage_runtime.errors import NotResumableError

logger = logging.getLogger(__name__)

#: What vLLM runs at once when ``max_num_seqs`` is not given; corrected when the engine has loaded.
_USUAL_CAPACITY: Final = 256


class HandoffArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When the stage hands over: always, or only answers that hold ``require_token``."""

    require_token: str = ""


@dataclass(slots=True)
class _Answer:
    request: StageRequest
    prompt_token_ids: Sequence[int]
    #: The whole answer, with what another replica showed of it.
    token_ids: list[int] = field(default_factory=list)
    #: Makes the text of an answer that another replica began; vLLM itself makes that of the others.
    wording: Wording | None = None
    #: How many tokens of the prompt are what earlier segments asked and were answered.
    earlier: int = 0


class VllmEngine:
    """A stage that makes tokens. Hands over ``token_ids``: all ids of the answer, special ones included."""

    def __init__(self, stage: StageConfig) -> None:
        self._stage = stage
        self._args = dict(stage.engine_args)
        self._handoff = checked_args(stage, HandoffArgs, self._args.pop("handoff", {}), "engine_args.handoff")
        allow_rpc = self._args.pop("allow_rpc", ())
        self._allow_rpc = checked_args(stage, tuple[str, ...], allow_rpc, "engine_args.allow_rpc")
        self._pd = PrefillDecode(stage, self._args)
        self._is_local = check_model_folder(stage)
        self._capacity = int(self._args.get("max_num_seqs", _USUAL_CAPACITY))
        self._llm: Any = None
        self._tokenizer: Any = None
        self._model = Model(None, 0, 0, frozenset())
        self._takes_priority = False
        self._required_id: int | None = None
        #: What is in the engine, by request key.
        self._answers: dict[str, _Answer] = {}
        #: What was asked and answered so far of requests that come in segments, by key.
        self._talks: dict[str, list[int]] = {}
        #: Ends that vLLM has no part in.
        self._said: list[EngineOutput] = []

    @property
    def capacity(self) -> int:
        """See Engine."""
        return self._capacity

    @property
    def modality(self) -> str:
        """See Engine."""
        return "text"

    @property
    def not_resumable(self) -> Mapping[str, str]:
        """See Engine. What one replica shows and another continues is what one alone would have said."""
        return NOT_RESUMABLE

    @property
    def controls(self) -> Mapping[str, Callable[..., Any]]:
        """See ControlEngine."""
        return {} if self._llm is None else vllm_controls(self._llm, self._allow_rpc)

    def load(self, report: Report) -> None:
        """See Engine."""
        report("importing vllm", 0.05)
        from vllm import EngineArgs, LLMEngine

        report("loading the model", 0.4)
        arguments = engine_args_of(self._stage, {**self._args, **self._pd.engine_args()}, EngineArgs)
        try:
            self._llm = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        except ValueError as error:
            raise ConfigError(f"stage {self._stage.stage_id}: vLLM refuses model or engine_args: {error}") from error
        except OSError as error:
            if self._is_local:
                raise ConfigError(f"stage {self._stage.stage_id}: {self._stage.model}: {error}") from error
            raise
        scheduling = self._llm.vllm_config.scheduler_config
        self._capacity, self._takes_priority = int(scheduling.max_num_seqs), str(scheduling.policy) == "priority"
        self._tokenizer = self._llm.get_tokenizer()
        self._model = self._describe_model()
        self._pd.loaded(self._llm.vllm_config)
        self._required_id = self._resolve(self._handoff.require_token)
        report("warming up", 0.9)
        self._warm_up()

    def add(self, request: StageRequest) -> None:
        """See Engine."""
        if request.key in self._answers:
            raise InvalidRequestError("the request is running already")
        params = self._sampling_params(request)
        earlier = self._talks.get(request.key, [])
        handed = self._pd.prompt_of(request)
        if request.segment is not None and (self._pd.is_prefill or handed):
            raise InvalidRequestError("a stage that is split into prefill and decode takes no input in segments")
        given = handed or read_prompt(self._tokenizer, request.inputs, begins=not earlier)
        prompt_token_ids = [*earlier, *given]
        self._pd.prepare(request, params)
        if not given:
            raise InvalidRequestError("the prompt is empty")
        check_prompt(prompt_token_ids, self._model.max_model_len, self._model.vocab_size)
        answer = _Answer(request, prompt_token_ids, earlier=len(earlier))
        if request.resume is not None and not self._resume(answer, prompt_token_ids, params, request.resume):
            return
        try:
            self._submit(request.key, [*prompt_token_ids, *answer.token_ids], params, request.priority)
        except InvalidRequestError as error:
            if not answer.token_ids:
                raise
            raise NotResumableError(f"{vllm_resume.refusal('other prompt')}: {error}") from error
        self._answers[request.key] = answer

    def update(self, request: StageRequest) -> None:
        """See SegmentEngine. The prompt is all that was asked and answered so far, and the new segment behind it."""
        self.add(request)

    def abort(self, key: str) -> None:
        """See Engine."""
        self._talks.pop(key, None)
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._llm.abort_request([key])
            # vLLM itself says nothing any more about what it was told to stop.
            self._said.append(EngineOutput(key, finish_reason="abort", usage=_usage(answer)))

    def has_unfinished(self) -> bool:
        """See Engine."""
        return bool(self._answers or self._said) or self._pd.has_more(self._llm)

    def step(self) -> list[EngineOutput]:
        """See Engine."""
        outputs, self._said = self._said, []
        if self._answers or self._pd.wait_for_more(self._llm):
            for made in self._llm.step():
                output = self._read(made)
                if output is not None:
                    outputs.append(output)
        return outputs

    def close(self) -> None:
        """See Engine."""
        llm, self._llm = self._llm, None
        if llm is not None:
            self._answers.clear()
            with rendezvous_removed():
                llm.engine_core.shutdown()

    def _describe_model(self) -> Model:
        config = self._llm.vllm_config.model_config
        # As vLLM itself finds out what ends an answer.
        more = config.try_get_generation_config().get("eos_token_id")
        eos = [self._tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
        return Model(
            tokenizer=self._tokenizer,
            max_model_len=int(config.max_model_len),
            vocab_size=int(config.get_vocab_size()),
            eos_token_ids=frozenset(int(each) for each in eos if each is not None),
            has_logits_processors=bool(self._args.get("logits_processors")),
        )

    def _resolve(self, token: str) -> int | None:
        if not token:
            return None
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == self._tokenizer.unk_token_id:
            where = f"stage {self._stage.stage_id}: engine_args.handoff.require_token"
            raise ConfigError(f"{where}: {token!r} is not one token of the model")
        return int(token_id)

    def _warm_up(self) -> None:
        # One token through the whole engine: an engine that can't do that must not be called ready.
        self._submit("warm-up", [0, 0], sampling_params({"max_tokens": 1, "temperature": 0.0}))
        while self._llm.has_unfinished_requests():
            self._llm.step()

    def _sampling_params(self, request: StageRequest) -> Any:
        return sampling_params(token_sampling(request.params))

    def _resume(self, answer: _Answer, prompt_token_ids: Sequence[int], params: Any, resume: Resume) -> bool:
        """Take over what was shown; whether there is anything left to say. Raise NotResumableError."""
        vllm_resume.check(params, self._model)
        answer.token_ids += resume.token_ids
        ended = vllm_resume.end_of(resume.token_ids, len(answer.prompt_token_ids), params, self._model)
        answer.wording = Wording(answer.request.key, prompt_token_ids, params, self._model)
        answer.wording.replay(resume, stopped=ended == "stop")
        if ended is not None:
            self._said.append(self._end_of(answer, EngineOutput(answer.request.key, finish_reason=ended)))
            return False
        vllm_resume.shorten(params, len(resume.token_ids))
        return True

    def _submit(self, key: str, prompt_token_ids: Sequence[int], params: Any, priority: int = 0) -> None:
        # vLLM refuses a priority where nobody may overtake.
        more = {"priority": priority} if self._takes_priority else {}
        try:
            self._llm.add_request(key, {"prompt_token_ids": list(prompt_token_ids)}, params, **more)
        except (ValueError, _client_error()) as error:
            raise InvalidRequestError(str(error)) from error

    def _read(self, made: Any) -> EngineOutput | None:
        try:
            return self._output_of(made)
        except Exception as error:
            # vLLM is done with its step: what one output broke is that request's own.
            logger.exception("engine.output_failed")
            self._llm.abort_request([made.request_id])
            self._answers.pop(made.request_id, None)
            self._talks.pop(made.request_id, None)
            return EngineOutput(made.request_id, error=(FailureKind.ENGINE, f"{type(error).__name__}: {error}"))

    def _output_of(self, made: Any) -> EngineOutput | None:
        answer = self._answers.get(made.request_id)
        if answer is None or not made.outputs:
            return None
        piece = made.outputs[0]
        token_ids = tuple(int(token_id) for token_id in piece.token_ids)
        answer.token_ids += token_ids
        if made.finished:
            del self._answers[made.request_id]
        if piece.finish_reason == "error":
            reason = str(getattr(made, "error", None) or "the engine could not finish this request")
            return EngineOutput(made.request_id, error=(FailureKind.ENGINE, reason))
        if self._pd.is_prefill:
            return self._prefilled(answer, made) if made.finished else None
        finish_reason = (piece.finish_reason or "stop") if made.finished else None
        text = piece.text if answer.wording is None else answer.wording.text_of(token_ids, finish_reason)
        output = EngineOutput(made.request_id, text=text, token_ids=token_ids, finish_reason=finish_reason)
        return self._end_of(answer, output) if made.finished else output

    def _prefilled(self, answer: _Answer, made: Any) -> EngineOutput:
        # The answer is the decode stage's from its first token on.
        handed = self._pd.hand_over(answer.request, answer.prompt_token_ids, getattr(made, "kv_transfer_params", None))
        usage = {"prompt_tokens": len(answer.prompt_token_ids), "completion_tokens": 0}
        return EngineOutput(made.request_id, finish_reason="stop", handoff=handed, usage=usage)

    def _end_of(self, answer: _Answer, last: EngineOutput) -> EngineOutput:
        if answer.request.segment is not None:
            self._talks[last.key] = [*answer.prompt_token_ids, *answer.token_ids]
        return replace(last, handoff=self._handoff_of(answer), usage=_usage(answer))

    def _handoff_of(self, answer: _Answer) -> Mapping[str, Any] | None:
        if not answer.request.next_stages:
            return None
        if self._required_id is not None and self._required_id not in answer.token_ids:
            return None
        import torch

        return {"token_ids": torch.tensor(answer.token_ids, dtype=torch.int64)}


def _usage(answer: _Answer) -> dict[str, int]:
    return {"prompt_tokens": len(answer.prompt_token_ids) - answer.earlier, "completion_tokens": len(answer.token_ids)}


def _client_error() -> type[Exception]:
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError
