"""The engine client of vLLM-Omni's server, whose engine is the pipeline with all of its replicas."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_omni.entrypoints.async_omni import AsyncOmni as PeerAsyncOmni
from vllm_omni.outputs import OmniRequestOutput

from hub.api.errors import NotServedError
from hub.api.exchange import current_exchange
from hub.api.vllm.bounds.body import asked_now
from hub.api.vllm.bounds.fan_out import announce, in_flight
from hub.api.vllm.errors import OmniHttpError
from hub.api.vllm.omni.errors import current_outcome, not_served, noted
from hub.api.vllm.omni.outputs import FinalStage
from hub.api.vllm.omni.params import changed_params
from hub.api.vllm.omni.prompts import inputs_of
from hub.api.vllm.serving import ServingHub
from omni_discovery.errors import InvalidRequestError, OmniError, RequestError, StageUnavailableError

if TYPE_CHECKING:
    from hub.api.vllm.omni.pipeline import ServedPipeline
    from hub.async_omni import AsyncOmni
    from hub.request.outputs import OmniOutput

logger = logging.getLogger(__name__)


class PipelineClient(ServingHub, PeerAsyncOmni):  # type: ignore[misc, unused-ignore]
    """It is one of vLLM-Omni's own class, because its server asks for that; nothing of that class is initialized.

    What its server asks of an engine and a hub has not raises an error with status 501 and the reason.
    """

    def __init__(self, omni: AsyncOmni, pipeline: ServedPipeline) -> None:
        self._omni = omni
        self._pipeline = pipeline
        self.model = omni.graph.deploy.stages[0].model
        self.input_processor = pipeline.input_processor
        self.io_processor = None
        self.endpoint_restrictions = pipeline.restrictions
        self.output_modalities = list(pipeline.outputs)
        self.default_sampling_params_list = list(pipeline.default_params)
        self.sampling_constraints_list = self._get_sampling_constraints_list(pipeline.stage_configs)
        self.async_chunk = omni.graph.deploy.async_chunk
        self.tts_batch_max_items = 32
        self.tts_max_instructions_length = None
        self.log_stats = False
        #: The server's figures of requests; the hub has its own.
        self.mod_metrics = None
        self.request_states: dict[str, Any] = {}
        #: Whether calls are read by a parser that may get them in larger pieces than they came in.
        self.paces_calls = False
        self._numbers = itertools.count()
        #: The hub's ids of the requests in flight, by the server's.
        self._running: dict[str, list[str]] = {}

    # ---- what the server reads of it

    @property
    def engine(self) -> NoReturn:
        """Raise AttributeError: there is none in this process."""
        raise AttributeError("a hub has no engine of its own")

    @property
    def stage_configs(self) -> list[Any]:
        """The stages, in pipeline order."""
        return self._pipeline.stage_configs

    @property
    def num_stages(self) -> int:
        """How many stages the pipeline has."""
        return len(self._pipeline.stage_configs)

    @property
    def vllm_config(self) -> Any:
        """That of the first stage; None where it makes pictures of text."""
        return self._pipeline.vllm_config

    @property
    def dead_error(self) -> BaseException:
        """The error of requests while ``errored``."""
        error = self._trouble() or StageUnavailableError(self._pipeline.stage_ids[0], "the hub is stopping")
        noted(error)
        return OmniHttpError(error)

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        """The tasks that the server offers routes for."""
        return self._pipeline.tasks

    async def get_tokenizer(self) -> Any:
        """The tokenizer of the first stage's model; None where it has none."""
        return None if self.renderer is None else self.renderer.get_tokenizer()

    def get_diffusion_od_config(self) -> None:
        """None: what a diffusion stage is made of is known to its replicas only."""

    async def check_health(self) -> None:
        """Raise VLLMError if the hub can't serve; a stage without replicas is no reason to restart a hub."""
        if self.errored:
            raise self.dead_error

    # ---- requests

    def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        request_id: str = "",
        *,
        lora_request: Any = None,
        sampling_params_list: Sequence[Any] | None = None,
        output_modalities: Sequence[str] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        **_: Any,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Start a request. Raise VLLMError for a wrong one at once, so that a stream gets a status, too."""
        with _as_the_server_has_them():
            if lora_request is not None:
                raise NotServedError("adapters can't be asked of these stages; --api vllm serves them")
            if data_parallel_rank is not None:
                raise InvalidRequestError("a data parallel rank can't be chosen: the hub picks the replica")
            self._omni.client_bounds.check_asked(None, priority)
            announce(1)
            asked = self._asked(sampling_params, sampling_params_list)
            decode = self._decode if self._pipeline.speaks else None
            inputs, of_pictures = inputs_of(prompt, decode, current_outcome().chat)
            params = self._params(asked, of_pictures)
        current_outcome().has_asked = True
        paced = self.paces_calls and asked_now().has_tools
        made = {
            each: FinalStage(request_id, kind, _tokens(inputs), is_paced=paced)
            for each, kind in self._kinds(asked).items()
        }
        more = {"priority": priority, "trace_headers": trace_headers, "modalities": _wanted(output_modalities)}
        return self._outputs(request_id, inputs, {"params": params, **more}, made)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self.renderer.get_tokenizer().decode(token_ids, skip_special_tokens=True))

    def _asked(self, sampling_params: Any, sampling_params_list: Sequence[Any] | None) -> Sequence[Any]:
        """The parameters of each stage, with what the pipeline wants of them in any case."""
        if sampling_params_list is None and sampling_params is not None:
            sampling_params_list = [sampling_params, *self.default_sampling_params_list[1:]]
        try:
            asked: Sequence[Any] = self.resolve_sampling_params_list(sampling_params_list, allow_delta_coercion=True)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"sampling_params_list: {error}") from error
        return asked

    def _params(self, asked: Sequence[Any], of_pictures: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        params: dict[int, Mapping[str, Any]] = {}
        stages = zip(self._pipeline.stage_ids, self.stage_configs, asked, self._pipeline.default_params, strict=True)
        for stage_id, config, each, usual in stages:
            shared = dict(of_pictures) if config.stage_type == "diffusion" else {}
            if changed := {**shared, **changed_params(each, usual)}:
                params[stage_id] = changed
        return params

    def _kinds(self, asked: Sequence[Any]) -> dict[int, Any]:
        from vllm.sampling_params import RequestOutputKind

        usual = RequestOutputKind.FINAL_ONLY
        kinds = (getattr(each, "output_kind", usual) for each in asked)
        return dict(zip(self._pipeline.stage_ids, kinds, strict=True))

    async def _outputs(
        self, request_id: str, inputs: Mapping[str, Any], more: Mapping[str, Any], made: Mapping[int, FinalStage]
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        with self._registered(request_id) as inner_id, _as_the_server_has_them():
            async with aclosing(self._stage_outputs(inner_id, inputs, more)) as outputs:
                async for output in outputs:
                    shown = await made[output.stage_id].add(output)
                    if shown is not None:
                        current_outcome().has_output = True
                        yield shown

    async def _stage_outputs(
        self, inner_id: str, inputs: Mapping[str, Any], more: Mapping[str, Any]
    ) -> AsyncGenerator[OmniOutput, None]:
        exchange = current_exchange()
        outputs = self._omni.generate(
            inputs, request_id=inner_id, label=exchange.label, key=exchange.key, client=exchange.client, **more
        )
        try:
            async with in_flight(), aclosing(outputs):
                async for output in outputs:
                    exchange.note_output(output)
                    if not output.is_summary:
                        yield output
        except RequestError as error:
            exchange.note_error(error)
            raise

    @contextmanager
    def _registered(self, request_id: str) -> Iterator[str]:
        """The hub's id of a request, which ``abort`` finds while the block runs."""
        # The hub's own name of the HTTP request begins it, by which its logs are searched.
        inner_id = f"{current_exchange().request_id}-{next(self._numbers)}"
        self._running.setdefault(request_id, []).append(inner_id)
        try:
            yield inner_id
        finally:
            self._running[request_id].remove(inner_id)
            if not self._running[request_id]:
                del self._running[request_id]

    async def abort(self, request_id: str | Iterable[str], **_: Any) -> None:
        """Abort requests, by the ids that ``generate`` got. Does nothing for unknown ids."""
        wanted = [request_id] if isinstance(request_id, str) else list(request_id)
        try:
            await self._omni.abort([inner_id for each in wanted for inner_id in self._running.get(each, ())])
        except RequestError as error:
            # The server aborts in tasks that it does not look at again.
            logger.warning("request.abort_unconfirmed %s", error)

    def close(self) -> None:
        """Do nothing: the hub stops by itself."""

    # ---- what a hub can't do for it

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        """Raise VLLMError, 501."""
        raise not_served("this pipeline makes no embeddings; --api vllm serves a stage that does")

    async def add_lora(self, *_: Any, **__: Any) -> NoReturn:
        """Raise VLLMError, 501."""
        raise not_served("adapters can't be asked of these stages; --api vllm serves them")

    async def submit_interaction_async(self, *_: Any, **__: Any) -> NoReturn:
        """Raise VLLMError, 501."""
        raise not_served("a request can't be changed while it runs")

    async def collective_rpc(self, *_: Any, **__: Any) -> NoReturn:
        """Raise VLLMError, 501. Sleep, profiles, caches and pauses of vLLM-Omni's class go this way, too."""
        raise not_served("replicas are controlled by their operators (--admin-api), not by clients of the API")

    async def sleep(self, *_: Any, **__: Any) -> NoReturn:
        """Raise VLLMError, 501."""
        await self.collective_rpc()

    wake_up = is_sleeping = pause_generation = resume_generation = sleep
    reset_mm_cache = reset_encoder_cache = reset_prefix_cache = sleep
    start_profile = stop_profile = sleep


def _tokens(inputs: Mapping[str, Any]) -> list[int]:
    return list(inputs.get("prompt_token_ids", ()))


def _wanted(modalities: Sequence[str] | None) -> list[str] | None:
    """What a request asks for; None, everything, where it says nothing."""
    return list(modalities) if modalities else None


@contextmanager
def _as_the_server_has_them() -> Iterator[None]:
    """Note the hub's errors, and raise them as vLLM's."""
    try:
        yield
    except OmniError as error:
        raise noted(error) from error
