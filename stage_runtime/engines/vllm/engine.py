"""A vLLM stage that generates tokens, in the replica's own process and stepped by the thread that owns it.

vLLM starts no process of its own here: engine, process and lease live and die together. The same code runs vLLM's CPU
and GPU builds; ``engine_args`` go to vLLM as they are, but for ``handoff``, ``pd``, ``allow_rpc`` and
``tool_call_parser``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.config import NotResumableError
from stage_runtime.engines.base import EngineOutput, Report, StageRequest, checked_args
from stage_runtime.engines.client_threads import work_of
from stage_runtime.engines.errors import error_of
from stage_runtime.engines.sampling import token_sampling
from stage_runtime.engines.vllm import prompt_logprobs, resume
from stage_runtime.engines.vllm.base import LlmStage, failed_output
from stage_runtime.engines.vllm.forms.checking import check_form
from stage_runtime.engines.vllm.handoff import Answer, HandoffArgs, Handoffs, HiddenStates
from stage_runtime.engines.vllm.interrupt import can_pause, rest_of, take_over
from stage_runtime.engines.vllm.load import id_of_token
from stage_runtime.engines.vllm.output import new_output
from stage_runtime.engines.vllm.prefill_decode import PrefillDecode
from stage_runtime.engines.vllm.prompt import Prompt, Reading, checked_prompt, read_request, salt_of
from stage_runtime.engines.vllm.read_ahead import PartialPrompt, ReadAhead
from stage_runtime.engines.vllm.resume import NOT_RESUMABLE
from stage_runtime.engines.vllm.sampling_params import check_runner_bounds, sampling_params
from stage_runtime.engines.vllm.tools.calls import ToolCalls

logger = logging.getLogger(__name__)

_NO_FORMS: Final = (
    "structured_outputs: this stage takes embeddings and makes no answers of a form; where all clients are trusted, the"
    " operator gives it engine_args.structured_outputs_config: {backend: xgrammar}"
)

_NO_GRAMMARS: Final = (
    "structured_outputs.grammar: this stage takes no grammars, as some hold up all of its requests; ask for json, regex"
    " or choice. Where all clients are trusted, the operator gives it engine_args.allow_grammars: true"
)


class VllmEngine(LlmStage):
    """Generates tokens, and hands over ``token_ids``, int64 of shape [tokens], special ones included, and ``text``.

    Takes the client's prompt or the hand-offs of earlier stages, see ``prompt.read_request``.
    """

    def __init__(self, stage: StageConfig) -> None:
        arguments = dict(stage.engine_args)
        self._handoff = checked_args(stage, HandoffArgs, arguments.pop("handoff", {}), "engine_args.handoff")
        self._pd = PrefillDecode(stage, arguments)
        self._where = f"stage {stage.stage_id}: engine_args.handoff"
        if self._handoff.hidden_states and self._pd.role is not None:
            raise ConfigError(f"{self._where}.hidden_states: a stage that is split into prefill and decode has not all")
        self._calls = ToolCalls(stage, arguments, is_split=self._pd.role is not None)
        super().__init__(stage, arguments)
        # The next two are there once the engine has loaded.
        self._read_ahead: ReadAhead
        self._handoffs: Handoffs
        self._hidden: HiddenStates | None = None
        #: Requests with a complete prompt, running or paused, by key.
        self._answers: dict[str, Answer] = {}
        #: Requests that wait for the rest of their prompt, by key.
        self._partial: dict[str, PartialPrompt] = {}
        #: Token ids of the earlier segments and their answers, of requests that come in segments, by key.
        self._earlier: dict[str, list[int]] = {}

    @property
    def modality(self) -> str:
        """See Engine."""
        return "text"

    @property
    def kv_hosts(self) -> list[str]:
        """See KvEngine."""
        return self._pd.kv_hosts

    @property
    def not_resumable(self) -> Mapping[str, str]:
        """See Engine. A continued answer is token for token that of one replica alone."""
        return NOT_RESUMABLE

    def load(self, report: Report) -> None:
        """See Engine."""
        self._load(report, {**self._args, **self._pd.engine_args()})
        self._pd.loaded(self._llm)
        self._calls.load(self._model.tokenizer)
        required = id_of_token(self._model.tokenizer, self._handoff.require_token, f"{self._where}.require_token")
        self._handoffs = Handoffs(required)
        if self._handoff.hidden_states:
            self._hidden = HiddenStates(self._llm, f"{self._where}.hidden_states")
        # What vLLM compiles for log probabilities it would else compile within a step of others' answers.
        likely = {"logprobs": 1} if self._llm.vllm_config.model_config.max_logprobs else {}
        self._warm_up(report, sampling_params({"max_tokens": 1, "temperature": 0.0, **likely}), self._hidden)
        self._read_ahead = ReadAhead(self._runs, self._model)

    def add(self, request: StageRequest) -> None:
        """See Engine."""
        if any(request.key in known for known in (self._answers, self._partial, self._reader)):
            raise InvalidRequestError("the request is running already")
        asked = dict(request.params)
        tools = self._calls.asked(request)
        if tools is not None:
            asked |= self._calls.params(tools)
        lora = self._adapters.named(asked.pop("lora", None))
        params = sampling_params(token_sampling(asked, checks_form=False), self._model.vocab_size)
        check_runner_bounds(params, self._llm.vllm_config)
        if params.structured_outputs is not None and not self._model.makes_forms:
            raise InvalidRequestError(_NO_FORMS)
        if not self._allows_grammars and getattr(params.structured_outputs, "grammar", None) is not None:
            raise InvalidRequestError(_NO_GRAMMARS)
        is_split, keeps_rows = self._pd.role is not None, self._hidden is not None
        prompt_logprobs.settle(params, request, self._llm.vllm_config, is_split=is_split, keeps_rows=keeps_rows)
        if request.stream_from:
            self._partial[request.key] = PartialPrompt.of(request, params, lora)
        elif not self._read_aside(request, params, lora):
            self._start_request(request, params, lora)

    def keeps_pieces(self, key: str) -> bool:
        """See PieceEngine."""
        return key in self._partial

    def feed(self, key: str, from_stage: int, piece: Mapping[str, Any] | None, is_last: bool) -> None:
        """See PieceEngine."""
        partial = self._partial.get(key)
        if partial is None:
            return
        partial.add_piece(from_stage, piece, self._model, is_last=is_last)
        whole = partial.whole()
        if whole is None:
            self._read_ahead.read_ahead(partial)
            return
        self._read_ahead.stop(key)
        del self._partial[key]
        if self._read_aside(whole, partial.params, partial.lora):
            self._reader.pause(key, paused=partial.is_paused)
        else:
            self._start_request(whole, partial.params, partial.lora, is_paused=partial.is_paused)

    def pause(self, key: str, paused: bool) -> bool:
        """See PieceEngine. An answer that could not be continued exactly is not paused."""
        partial, answer = self._partial.get(key), self._answers.get(key)
        if partial is not None:
            partial.is_paused = paused
        self._reader.pause(key, paused=paused)
        if answer is None or answer.is_paused == paused:
            return answer is not None and paused
        if not paused:
            self._continue(answer)
        elif self._pd.role is None and can_pause(answer, self._model):
            self._runs.stop(key)
            answer.is_paused = True
        return answer.is_paused

    def update(self, request: StageRequest) -> None:
        """See SegmentEngine. The prompt is every earlier segment with its answer, and then the new segment."""
        self.add(request)

    def abort(self, key: str) -> None:
        """See Engine."""
        partial, answer = self._partial.get(key), self._answers.get(key)
        is_read = key in self._reader
        self._drop(key)
        if partial is not None or answer is not None or is_read:
            # vLLM puts out nothing for an aborted request.
            usage = {"prompt_tokens": 0, "completion_tokens": 0} if answer is None else answer.usage
            self._due.append(EngineOutput(key, finish_reason="abort", usage=usage))

    def has_unfinished(self) -> bool:
        """See Engine."""
        return super().has_unfinished() or self._pd.has_more(self._llm)

    def close(self) -> None:
        """See Engine."""
        self._answers.clear()
        hidden, self._hidden = self._hidden, None
        if hidden is not None:
            hidden.close()
        super().close()

    def _read_aside(self, request: StageRequest, params: Any, lora: Any) -> bool:
        """Whether the request begins later: its prompt is long, or its answer is to have a form."""
        earlier = self._earlier.get(request.key, [])
        if params.structured_outputs is None:
            return self._reader.read_long(request, params, lora, self._model, earlier)
        check = functools.partial(check_form, params, self._llm.vllm_config, self._model.tokenizer)
        with work_of(request.client):
            self._reader.read_behind(check, self._form_threads, request, params, lora, self._model, earlier)
        return True

    def _start_read(self, reading: Reading, prompt: Prompt | None) -> None:
        self._start_request(reading.request, reading.params, reading.lora, is_paused=reading.is_paused, read=prompt)

    def _has_work(self) -> bool:
        return super()._has_work() or self._pd.wait_for_more(self._llm)

    def _start_request(
        self, request: StageRequest, params: Any, lora: Any, *, is_paused: bool = False, read: Prompt | None = None
    ) -> None:
        """Start a request whose prompt is complete. Raise what ``add`` raises."""
        earlier = self._earlier.get(request.key, [])
        handed = self._pd.prompt_of(request)
        if request.segment is not None and (self._pd.is_prefill or handed is not None):
            raise InvalidRequestError("a stage that is split into prefill and decode takes no input in segments")
        if handed is None:
            prompt = read_request(request, self._model, earlier) if read is None else read
        else:
            prompt = checked_prompt(Prompt(handed, salt=salt_of(request, self._model)), self._model)
        if prompt.items is not None and self._pd.role is not None:
            raise InvalidRequestError("a stage that is split into prefill and decode takes text and tokens only")
        answer = Answer(request, prompt, params, lora, earlier=len(earlier), is_paused=is_paused)
        if request.resume is not None and not self._resume(answer):
            return
        if not is_paused:
            self._start(answer)
        self._answers[request.key] = answer

    def _resume(self, answer: Answer) -> bool:
        """Continue what another replica has shown; whether tokens are left to generate. Raise NotResumableError."""
        last = take_over(answer, self._model)
        if last is not None:
            self._due.append(self._end_of(answer, last))
        return last is None

    def _start(self, answer: Answer) -> None:
        """Have vLLM generate the rest of an answer. Raise InvalidRequestError; NotResumableError if it was begun."""
        request = answer.request
        prompt, params = rest_of(answer)
        answer.given = len(answer.token_ids)
        self._pd.prepare(request, params)
        try:
            answer.rows = self._runs.start(
                request.key, prompt, params, request.priority, answer.lora, request.trace, request.client
            )
        except InvalidRequestError as error:
            if not answer.token_ids:
                raise
            raise NotResumableError(f"{resume.refusal('other prompt')}: {error}") from error

    def _continue(self, answer: Answer) -> None:
        answer.is_paused = False
        try:
            self._start(answer)
        except (InvalidRequestError, NotResumableError) as error:
            self._drop(answer.request.key)
            self._due.append(EngineOutput(answer.request.key, error=error_of(error)))

    def _drop(self, key: str) -> None:
        for known in (self._earlier, self._partial, self._answers):
            known.pop(key, None)
        self._reader.stop(key)
        self._runs.stop(key)
        self._read_ahead.stop(key)

    def _read_output(self, made: Any) -> EngineOutput | None:
        if self._read_ahead.consume_output(made):
            return None
        try:
            return self._output_of(made)
        except Exception as error:
            # vLLM is done with its step, so the other requests are unharmed.
            logger.exception("engine.output_failed")
            self._drop(made.request_id)
            return failed_output(made.request_id, error)

    def _output_of(self, made: Any) -> EngineOutput | None:
        answer = self._answers.get(made.request_id)
        if answer is None or not made.outputs:
            return None
        piece = made.outputs[0]
        token_ids = tuple(map(int, piece.token_ids))
        answer.token_ids += token_ids
        if answer.prompt.items is not None:
            answer.item_tokens = len(made.prompt_token_ids) - answer.given - len(answer.prompt)
        if made.finished:
            del self._answers[made.request_id]
            self._runs.run_ended(made.request_id)
        if piece.finish_reason == "error":
            return EngineOutput(made.request_id, error=self._ended_by_error(answer, getattr(made, "error", None)))
        if self._pd.is_prefill:
            return self._prefilled(answer, made) if made.finished else None
        finish_reason = (piece.finish_reason or "stop") if made.finished else None
        output = new_output(answer, made, token_ids, finish_reason, self._model)
        if made.finished:
            return self._end_of(answer, output)
        handed = self._handoffs.piece(answer, is_last=False)
        return output if handed is None else replace(output, handoff_piece=handed)

    def _ended_by_error(self, answer: Answer, error: Any) -> tuple[FailureKind, str, int]:
        # Where no KV cache came from elsewhere, vLLM ends a request without a reason only because of its grammar.
        if error is None and self._pd.role is None and answer.params.structured_outputs is not None:
            return FailureKind.INVALID, "structured_outputs: the engine can't make an answer of this form", 422
        return FailureKind.ENGINE, str(error or "the engine could not finish this request"), 400

    def _prefilled(self, answer: Answer, made: Any) -> EngineOutput:
        # The answer is the decode stage's from its first token on.
        prompt = answer.prompt.token_ids
        handed = self._pd.hand_over(answer.request, prompt, getattr(made, "kv_transfer_params", None))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 0}
        return EngineOutput(made.request_id, finish_reason="stop", handoff=handed, usage=usage)

    def _end_of(self, answer: Answer, last: EngineOutput) -> EngineOutput:
        if answer.request.segment is not None:
            self._earlier[last.key] = [*answer.prompt.token_ids, *answer.token_ids]
        tools = self._calls.asked(answer.request)
        called = None if tools is None else self._calls.called(tools, answer.text)
        last = replace(last, called=called)
        if called is not None and (called.calls or not called.content):
            # The next stages would say, or draw, how the model writes a call.
            return replace(last, usage=answer.usage)
        if called is not None:
            answer.texts = [called.content]
        piece = self._handoffs.piece(answer, is_last=True)
        return replace(last, handoff=self._handoffs.whole(answer), handoff_piece=piece, usage=answer.usage)
