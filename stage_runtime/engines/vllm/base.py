"""The common base of vLLM engines, for tokens and for pooling: loading, control methods, outputs, the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from omni_discovery.deploy.document import StageConfig
from omni_discovery.wire import FailureKind
from stage_runtime.engines.base import EngineOutput, Report
from stage_runtime.engines.client_threads import ClientThreads
from stage_runtime.engines.draws import give_draws_back
from stage_runtime.engines.errors import error_of, failure_kind
from stage_runtime.engines.ranks import count_ranks_plainly
from stage_runtime.engines.vllm.control import Adapters, vllm_controls
from stage_runtime.engines.vllm.forms.checking import check_forms_once
from stage_runtime.engines.vllm.forms.limits import limit_forms
from stage_runtime.engines.vllm.forms.threads import put_forms_behind_engine
from stage_runtime.engines.vllm.handoff import HiddenStates
from stage_runtime.engines.vllm.load import (
    Model,
    check_model,
    describe_model,
    details_of,
    load_llm,
    rendezvous_removed,
    take_allow_grammars,
    take_allow_rpc,
    take_share_prefix_cache,
    usual_capacity,
)
from stage_runtime.engines.vllm.prompt import Prompt, PromptReader, Reading
from stage_runtime.engines.vllm.runs import Runs, prepare_prompt

logger = logging.getLogger(__name__)


class LlmStage:
    """One LLMEngine in this process, stepped by the thread that owns it.

    A subclass checks its own arguments first and then calls ``__init__``, which raises ConfigError for a model folder
    that can't be loaded. ``_load`` has to come before everything else.
    """

    def __init__(self, stage: StageConfig, arguments: dict[str, Any]) -> None:
        self._stage = stage
        #: ``engine_args`` without those that are this project's own.
        self._args = arguments
        self._allow_rpc = take_allow_rpc(stage, self._args)
        self._allows_grammars = take_allow_grammars(stage, self._args)
        self._shares_cache = take_share_prefix_cache(stage, self._args)
        check_model(stage)
        self._capacity = usual_capacity(self._args)
        #: The LLMEngine; None before ``load`` and after ``close``.
        self._llm: Any = None
        # The next four are there once the engine has loaded.
        self._form_threads: ClientThreads
        self._model: Model
        self._runs: Runs
        self._adapters: Adapters
        #: Outputs for the next step that vLLM has no part in: aborts, and answers that were over already.
        self._due: list[EngineOutput] = []
        #: Requests whose prompt is long, or has pictures, and being read.
        self._reader = PromptReader()

    @property
    def capacity(self) -> int:
        """See Engine. ``max_num_seqs`` of vLLM, once it is loaded."""
        return self._capacity

    @property
    def controls(self) -> Mapping[str, Callable[..., Any]]:
        """See ControlEngine. Empty before ``load``."""
        return {} if self._llm is None else vllm_controls(self._llm, self._allow_rpc, self._adapters)

    def has_unfinished(self) -> bool:
        """See Engine."""
        return bool(self._runs or self._due or self._reader)

    def step(self) -> list[EngineOutput]:
        """See Engine. Requests whose prompts are read begin, and one step of vLLM's, if it has anything to work on."""
        self._start_those_read()
        outputs, self._due = self._due, []
        if self._has_work():
            outputs += [output for made in self._llm.step() if (output := self._read_output(made)) is not None]
        return outputs

    def metrics(self) -> Mapping[str, float]:
        """See MeasuredEngine. What vLLM's scheduler knows; empty where it is not in this process."""
        core = getattr(getattr(self._llm, "engine_core", None), "engine_core", None)
        scheduler = getattr(core, "scheduler", None)
        return {} if scheduler is None else scheduler_metrics(scheduler)

    def close(self) -> None:
        """See Engine."""
        self._reader.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            with rendezvous_removed():
                llm.engine_core.shutdown()
            self._form_threads.shutdown(wait=False, cancel_futures=True)

    def _load(self, report: Report, arguments: Mapping[str, Any]) -> None:
        """Load the LLMEngine with these arguments and read what its model is. Raise ConfigError."""
        report("importing vllm", 0.05)
        import vllm  # noqa: F401

        report("loading the model", 0.4)
        self._llm = load_llm(self._stage, arguments)
        check_forms_once()
        limit_forms()
        self._form_threads = put_forms_behind_engine(self._llm)
        give_draws_back(self._llm)
        count_ranks_plainly(self._llm)
        self._capacity = int(self._llm.vllm_config.scheduler_config.max_num_seqs)
        tokenizer = self._llm.get_tokenizer()
        self._model = describe_model(self._llm, tokenizer, self._args, shares_cache=self._shares_cache)
        #: See DescribedEngine.
        self.model_details = details_of(self._llm)

    def _warm_up(self, report: Report, params: Any, hidden: HiddenStates | None = None) -> None:
        """Be ready to start runs, and send one through the whole engine."""
        self._runs, self._adapters = Runs(self._llm, hidden), Adapters(self._llm)
        self._reader.prepare = partial(prepare_prompt, self._llm)
        report("warming up", 0.9)
        self._runs.warm_up(params)

    def _start_those_read(self) -> None:
        for reading in self._reader.take_read(waits=not (self._runs or self._due)):
            key = reading.request.key
            try:
                self._start_read(reading, reading.prompt.result())
            except Exception as error:
                # The engine is not in a step, so the other requests in it are unharmed.
                if failure_kind(error) is FailureKind.ENGINE:
                    logger.exception("engine.add_failed request=%s", reading.request.request_id)
                self._drop(key)
                self._due.append(EngineOutput(key, error=error_of(error)))

    def _start_read(self, reading: Reading, prompt: Prompt | None) -> None:
        """Start a request whose prompt was read, or its form checked, in a thread. Raise what ``add`` raises."""
        raise NotImplementedError

    def _drop(self, key: str) -> None:
        """Forget a request, and stop what runs for it. Unknown keys are ignored."""
        raise NotImplementedError

    def _has_work(self) -> bool:
        """Whether vLLM is to be stepped now."""
        return bool(self._runs)

    def _read_output(self, made: Any) -> EngineOutput | None:
        """Convert one output of vLLM to the output of its request; None if there is nothing to put out."""
        raise NotImplementedError


def scheduler_metrics(scheduler: Any) -> Mapping[str, float]:
    """The load of vLLM's scheduler, as far as this minor of vLLM tells it."""
    found: dict[str, float] = {}
    with suppress(AttributeError):
        found["requests_running"], found["requests_waiting"] = scheduler.get_request_counts()
    with suppress(AttributeError):
        found["kv_cache_usage"] = scheduler.kv_cache_manager.usage
    return found


def failed_output(key: str, error: Exception) -> EngineOutput:
    """The end of a request of which an output could not be read: vLLM is done with its step, so no other is hurt."""
    return EngineOutput(key, error=(FailureKind.ENGINE, f"{type(error).__name__}: {error}"))
