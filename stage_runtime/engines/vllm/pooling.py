"""A vLLM stage that pools: an embedding, class odds or a score out of each prompt, and no tokens.

The numbers are vLLM's own for its ``PoolingParams``. They come in one output, so another replica can always begin
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.text import essence
from omni_discovery.wire import MAX_ATTACHMENT_BYTES, FailureKind
from stage_runtime.engines.base import EngineOutput, Report, StageRequest
from stage_runtime.engines.files import npy_of
from stage_runtime.engines.sampling import pooling_asked
from stage_runtime.engines.vllm.base import LlmStage, failed_output
from stage_runtime.engines.vllm.engine import VllmEngine
from stage_runtime.engines.vllm.prompt import Prompt, Reading, read_request
from stage_runtime.engines.vllm.sampling_params import pooling_params

#: Arguments of a stage that generates tokens, which a stage that pools has not.
_NOT_HERE: Final = ("handoff", "pd", "tool_call_parser")


def engine_for(stage: StageConfig) -> VllmEngine | VllmPoolingEngine:
    """The engine of a vLLM stage: one that pools where the stage says so. Raise ConfigError."""
    runner = stage.engine_args.get("runner", "auto")
    if runner != "pooling" and stage.final_output != "embedding":
        return VllmEngine(stage)
    if runner not in ("auto", "pooling"):
        raise ConfigError(f"stage {stage.stage_id}: final_output is embedding, so engine_args.runner must be pooling")
    if stage.final_output not in ("embedding", "none"):
        raise ConfigError(
            f"stage {stage.stage_id}: engine_args.runner is pooling, so its final_output is embedding (or none), "
            f"not {stage.final_output}"
        )
    return VllmPoolingEngine(stage)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A running request. ``hands_over``: a next stage gets the numbers."""

    prompt_tokens: int
    hands_over: bool


class VllmPoolingEngine(LlmStage):
    """Puts out one array of float32 for each request, and hands it over as ``pooled``, vLLM's own tensor.

    Takes a prompt, or the hand-offs of earlier stages, see ``prompt.read_request``.
    """

    def __init__(self, stage: StageConfig) -> None:
        for name in _NOT_HERE:
            if name in stage.engine_args:
                raise ConfigError(f"stage {stage.stage_id}: engine_args.{name}: a stage that pools has none")
        super().__init__(stage, {**stage.engine_args, "runner": "pooling"})
        # The next two are there once the engine has loaded.
        #: The task of a request that names none; one of vLLM's.
        self._usual_task: str
        #: Whether the model wants its prompts in lower case.
        self._lowers: bool
        #: Running requests by key.
        self._asked: dict[str, _Asked] = {}

    @property
    def modality(self) -> str:
        """See Engine."""
        return "embedding"

    def load(self, report: Report) -> None:
        """See Engine."""
        self._load(report, self._args)
        self._model = replace(self._model, least_answer=0)
        model_config = self._llm.vllm_config.model_config
        self._lowers = bool((model_config.encoder_config or {}).get("do_lower_case"))
        self._usual_task = self._find_task(model_config)
        self._warm_up(report, pooling_params({}, self._usual_task))

    def add(self, request: StageRequest) -> None:
        """See Engine."""
        if request.key in self._asked or request.key in self._reader:
            raise InvalidRequestError("the request is running already")
        asked = dict(request.params)
        lora = self._adapters.named(asked.pop("lora", None))
        params = pooling_params(pooling_asked(asked), self._usual_task)
        readable = self._readable(request)
        if not self._reader.read_long(readable, params, lora, self._model, []):
            self._start(readable, params, lora, read_request(readable, self._model, []))

    def abort(self, key: str) -> None:
        """See Engine."""
        if key in self._asked or key in self._reader:
            self._drop(key)
            self._due.append(EngineOutput(key, finish_reason="abort", usage=_usage(0)))

    def close(self) -> None:
        """See Engine."""
        self._asked.clear()
        super().close()

    def _start(self, request: StageRequest, params: Any, lora: Any, prompt: Prompt) -> None:
        self._runs.start(request.key, prompt.with_answer(()), params, request.priority, lora, request.trace)
        self._asked[request.key] = _Asked(len(prompt), bool(request.next_stages))

    def _start_read(self, reading: Reading, prompt: Prompt | None) -> None:
        request = reading.request
        read = read_request(request, self._model, []) if prompt is None else prompt
        self._start(request, reading.params, reading.lora, read)

    def _drop(self, key: str) -> None:
        self._asked.pop(key, None)
        self._reader.stop(key)
        self._runs.stop(key)

    def _read_output(self, made: Any) -> EngineOutput | None:
        asked = self._asked.pop(made.request_id, None)
        if asked is None:
            return None
        self._runs.run_ended(made.request_id)
        return _output_of(made, asked)

    def _find_task(self, model_config: Any) -> str:
        tasks = self._llm.get_supported_tasks()
        try:
            task = model_config.get_pooling_task(tasks)
        except RuntimeError as error:
            told = f"engine_args.pooler_config: {essence(error)}"
            raise ConfigError(f"stage {self._stage.stage_id}: {told}") from error
        if task is None:
            raise ConfigError(f"stage {self._stage.stage_id}: vLLM has nothing that this model could pool: {tasks}")
        return str(task)

    def _readable(self, request: StageRequest) -> StageRequest:
        """The request with its prompt as the model wants it. Raise InvalidRequestError for messages."""
        if request.inputs.get("messages") is not None and not request.payloads:
            raise InvalidRequestError(
                "a stage that pools reads a prompt, or prompt_token_ids; messages are for a hub with --api vllm"
            )
        text = request.inputs.get("prompt")
        if self._lowers and isinstance(text, str):
            return msgspec.structs.replace(request, inputs={**request.inputs, "prompt": text.lower()})
        return request


def _output_of(made: Any, asked: _Asked) -> EngineOutput:
    problem = getattr(made, "error", None)
    if problem is not None:
        reason = str(getattr(problem, "message", None) or problem)
        return EngineOutput(made.request_id, error=(FailureKind.ENGINE, reason))
    try:
        pooled = made.outputs.data
        file = npy_of(pooled)
    except (AttributeError, TypeError, ValueError) as error:
        return failed_output(made.request_id, error)
    if len(file) > MAX_ATTACHMENT_BYTES:
        told = f"{len(file)} bytes were pooled, where an answer may have {MAX_ATTACHMENT_BYTES}: send a shorter prompt"
        return EngineOutput(made.request_id, error=(FailureKind.INVALID, told))
    handoff = {"pooled": pooled} if asked.hands_over else None
    usage = _usage(len(made.prompt_token_ids or ()) or asked.prompt_tokens)
    return EngineOutput(made.request_id, pooled_npy=file, finish_reason="stop", handoff=handoff, usage=usage)


def _usage(prompt_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": 0}
