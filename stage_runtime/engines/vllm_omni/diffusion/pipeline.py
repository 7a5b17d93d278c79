"""A diffusion pipeline of vLLM-Omni, loaded as vLLM-Omni does it, that draws one batch in one call."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from omni_discovery.text import essence
from stage_runtime.engines.base import check_model_folder
from stage_runtime.engines.errors import lacks_memory
from stage_runtime.engines.files import png_of
from stage_runtime.engines.pictures.request import Embeds, Picture, Traits
from stage_runtime.engines.pictures.steps import steps_heard
from stage_runtime.engines.pictures.thread import UnwantedError
from stage_runtime.engines.process_group import seal_single_rank_groups
from stage_runtime.engines.vllm_omni.diffusion.args import PARAMETERS, RUN, OmniDiffusionArgs, check_pipeline

_INDEX: Final = "model_index.json"
#: Sides of pictures are multiples of this, in pixels, where a pipeline does not say what its VAE scales by.
_SIDE_MULTIPLE: Final = 16


class OmniPipeline:
    """A loaded pipeline. ``draw`` is for one thread; everything else for the thread that made it."""

    def __init__(self, engine: Any, defaults: Any, max_side_px: int) -> None:
        self._engine = engine
        self._config = engine.od_config
        self._defaults = defaults
        self._numbers = itertools.count()
        self._model = engine.executor.driver_worker.worker.model_runner.pipeline
        if hasattr(self._model, "set_progress_bar_config"):
            self._model.set_progress_bar_config(disable=True)
        name = str(self._config.model_class_name)
        scale = getattr(self._model, "vae_scale_factor", None)
        self.traits = Traits(
            name=name,
            parameters=PARAMETERS | RUN.get(name, frozenset()),
            reads_text=True,
            # Twice: latents of the VAE are cut into patches of two by two.
            side_multiple=2 * scale if isinstance(scale, int) else _SIDE_MULTIPLE,
            max_side_px=max_side_px,
        )

    @property
    def capacity(self) -> int:
        """How many pictures it draws at once."""
        return int(self._config.max_num_seqs)

    @property
    def dtype(self) -> str:
        """What it computes in."""
        return str(self._config.dtype).removeprefix("torch.")

    def draw(self, pictures: Sequence[Picture], on_step: Callable[[int], None]) -> list[bytes]:
        """Draw pictures that are alike; one PNG each. ``on_step`` is called after each step; it may end it.

        A pipeline without a scheduler of its own is not seen to step, and goes on to its end.
        """
        from vllm_omni.diffusion.data import DiffusionRequestAbortedError

        def step_done(steps: int) -> None:
            try:
                on_step(steps)
            except UnwantedError as error:
                # What vLLM-Omni's own pipelines raise when they are told to stop: its worker makes no failure of it.
                raise DiffusionRequestAbortedError("nobody waits for these pictures any more") from error

        scheduler = getattr(self._model, "scheduler", None)
        requests = [self._prepared(picture) for picture in pictures]
        with nullcontext() if scheduler is None else steps_heard(scheduler, step_done):
            outputs = self._executed(requests)
        if any(output.aborted for output in outputs):
            raise UnwantedError
        return [self._png_of(request, output) for request, output in zip(requests, outputs, strict=True)]

    def is_lost(self) -> bool:
        """Whether the device can't compute any more."""
        return bool(self._engine.executor.is_dead)

    def close(self) -> None:
        """Release the model and its device. Idempotent."""
        self._engine.close()

    def _prepared(self, picture: Picture) -> Any:
        from vllm_omni.diffusion.request import OmniDiffusionRequest

        params = copy.deepcopy(self._defaults)
        params.seed = picture.seed
        for name, value in picture.params.items():
            setattr(params, name, value)
        prompt = self._prompt_of(picture)
        request = OmniDiffusionRequest(prompt=prompt, sampling_params=params, request_id=f"p{next(self._numbers)}")
        prepare = self._engine.pre_process_func
        return request if prepare is None else prepare(request)

    def _prompt_of(self, picture: Picture) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": ""}
        for prefix, said in (("", picture.prompt), ("negative_", picture.negative)):
            if isinstance(said, Embeds):
                prompt[f"{prefix}prompt_embeds"] = said.rows.to(self._model.device, self._config.dtype)
                prompt[f"{prefix}prompt_embeds_mask"] = said.mask.to(self._model.device)
            elif said is not None:
                prompt[f"{prefix}prompt"] = str(said)
        return prompt

    def _executed(self, requests: Sequence[Any]) -> list[Any]:
        from vllm_omni.diffusion.sched.interface import CachedRequestData, DiffusionSchedulerOutput, NewRequestData

        call = self._engine.executor.collective_rpc
        if len(requests) == 1:
            return [call("execute_model", args=(requests[0], self._config, None), unique_reply_rank=0)]
        scheduled = DiffusionSchedulerOutput(
            step_id=0,
            scheduled_new_reqs=[NewRequestData(request.request_id, request) for request in requests],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            finished_req_ids=set(),
            num_running_reqs=len(requests),
            num_waiting_reqs=0,
        )
        made = call("execute_model_batch", args=(scheduled, self._config), unique_reply_rank=0)
        return [made.get_request_output(request.request_id).result for request in requests]

    def _png_of(self, request: Any, output: Any) -> bytes:
        images = self._engine.postprocess_output(request, output)[0].images
        if len(images) != 1 or not hasattr(images[0], "save"):
            kinds = ", ".join(type(each).__name__ for each in images) or "nothing"
            raise RuntimeError(f"{self.traits.name} made {kinds}, and one picture was asked for")
        return png_of(images[0])


def load_pipeline(stage: StageConfig, args: OmniDiffusionArgs, given: Mapping[str, Any]) -> OmniPipeline:
    """Load it. Raise ConfigError where the operator must act; lack of memory is raised as it comes."""
    where = f"stage {stage.stage_id}"
    if check_model_folder(stage) and not (Path(stage.model).expanduser() / _INDEX).is_file():
        raise ConfigError(
            f"{where}: no {_INDEX} in {stage.model}: it holds no diffusion pipeline, and final_output: image asks for"
            " one. Stages that make text or sound have final_output: text, audio or none"
        )
    try:
        return _load(stage, args, given)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}: vLLM-Omni's diffusion engine needs the package {error.name!r}: pip install"
            " 'omni-discovery[vllm-omni]', in the environment of runtime: {python: ...}"
        ) from error
    except (ValueError, OSError, KeyError, TypeError) as error:
        if lacks_memory(error):
            raise
        raise ConfigError(f"{where}: vLLM-Omni refuses model or engine_args: {essence(error)}") from error


def _load(stage: StageConfig, args: OmniDiffusionArgs, given: Mapping[str, Any]) -> OmniPipeline:
    from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
    from vllm_omni.engine import stage_init_utils

    config = _stage_of(stage, given)
    metadata = stage_init_utils.extract_stage_metadata_from_omni_stage_config(config)
    settings = stage_init_utils.build_diffusion_config(stage.model, config, metadata)
    settings.enrich_config()
    check_pipeline(stage, settings.model_class_name, args)
    if settings.num_gpus != 1:
        raise ConfigError(
            f"stage {stage.stage_id}: vLLM-Omni would draw on {settings.num_gpus} devices, and engine 'vllm-omni' draws"
            " in one process: set the sizes of engine_args.parallel_config to 1"
        )
    settings.step_execution = settings.streaming_output = False
    with _names_kept():
        _join_alone()
        engine = DiffusionEngine.make_engine(settings)
    return OmniPipeline(engine, metadata.default_sampling_params, args.max_side_px)


def _stage_of(stage: StageConfig, given: Mapping[str, Any]) -> Any:
    """The one stage of the model's pipeline. Raise ConfigError for a pipeline of several."""
    from vllm_omni.config.resolver import resolve_omni_config

    trusted = bool(given.get("trust_remote_code", False))
    plan = resolve_omni_config(
        stage.model,
        trust_remote_code=trusted,
        deploy_config_path=None,
        cli_overrides={},
        stage_overrides={"0": {**given, "trust_remote_code": trusted}},
        strategy_config_path=None,
    )
    if len(plan.stage_configs) != 1:
        kinds = ", ".join(f"{each.stage_id} {each.model_stage}" for each in plan.stage_configs)
        raise ConfigError(
            f"stage {stage.stage_id}: vLLM-Omni's pipeline for {stage.model} has the stages {kinds}; engine 'vllm-omni'"
            " draws with pipelines of one stage. Behind a stage of vLLM-Omni that writes, drawing was not run"
        )
    return plan.stage_configs[0]


def _join_alone() -> None:
    """Make the process group of this one process, in memory: vLLM-Omni would open a port to every address for it."""
    from vllm_omni.platforms import current_omni_platform

    groups: Any = torch.distributed
    seal_single_rank_groups()
    if not groups.is_initialized():
        groups.init_process_group(current_omni_platform.dist_backend, store=groups.HashStore(), rank=0, world_size=1)


@contextmanager
def _names_kept() -> Iterator[None]:
    """Keep the process's title and the form of its log: vLLM-Omni's worker takes the process for its own."""
    import setproctitle

    title, writers = setproctitle.getproctitle(), [(each, each.write) for each in (sys.stdout, sys.stderr)]
    try:
        yield
    finally:
        setproctitle.setproctitle(title)
        for stream, write in writers:
            stream.write = write  # type: ignore[method-assign]
