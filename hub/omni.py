"""Omni: the pipeline for batches, without an event loop: a list of prompts in, a list of results out, in order."""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import uvloop

from hub.asked import inputs_of
from hub.cli import serve_config
from hub.command import ServeCommand
from hub.results import OmniResult, ResultBuilder
from hub.serve.document_flags import document_of, with_flags
from hub.serve.flags import check_flags
from hub.serve.running_hub import RunningHub, ServeConfig, embed_etcd
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.deploy.load import load_deploy
from omni_discovery.errors import ConfigError, OverloadedError, RequestError, StageUnavailableError
from omni_discovery.loop_thread import LoopThread

if TYPE_CHECKING:
    from types import TracebackType

    from hub.async_omni import AsyncOmni
    from hub.serve.local_stages import LocalStages

#: Seconds before a request to an overloaded hub is repeated, if its error has no retry_after_s.
_RETRY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Settings of each request of a batch. ``params`` is by stage id; ``timeout_s`` counts from the prompt's start."""

    max_concurrency: int
    timeout_s: float
    params: Mapping[int, Mapping[str, Any]] | None = None
    modalities: Sequence[str] | None = None


async def run_batch(
    omni: AsyncOmni, prompts: Sequence[Any], options: BatchOptions, on_done: Callable[[], object]
) -> list[OmniResult]:
    """Run all prompts; a failed one doesn't end the others. ``on_done`` is called after each. Cancelling aborts all."""
    batch = uuid.uuid4().hex[:12]
    results: dict[int, OmniResult] = {}
    waiting = iter(enumerate(prompts))

    async def work() -> None:
        # All workers share one iterator: a free one takes the next prompt.
        for index, prompt in waiting:
            results[index] = await _run_one(omni, index, f"batch-{batch}-{index}", prompt, options)
            on_done()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(options.max_concurrency, len(prompts))):
            group.create_task(work())
    return [results[index] for index in range(len(prompts))]


async def _run_one(omni: AsyncOmni, index: int, request_id: str, prompt: Any, options: BatchOptions) -> OmniResult:
    builder = ResultBuilder(index, request_id, prompt)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + options.timeout_s
    while True:
        try:
            left_s = max(0.001, deadline_s - loop.time())
            outputs = omni.generate(
                inputs_of(prompt),
                request_id=request_id,
                modalities=options.modalities,
                params=options.params,
                timeout_s=left_s,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    builder.add(output)
            return builder.result()
        except OverloadedError as error:
            pause_s = error.retry_after_s or _RETRY_S
            # Other clients may fill the hub's queues; a batch waits and retries until its timeout.
            if not builder.is_empty or loop.time() + pause_s >= deadline_s:
                return builder.result(error)
            await asyncio.sleep(pause_s)
        except RequestError as error:
            return builder.result(error)
        except Exception as error:  # noqa: BLE001 - an error of one prompt must not end the others
            return builder.result(RequestError(f"{type(error).__name__}: {error}"))


_CHECK_S: Final = 0.1
#: Interval between two checks of the local stages.
_RESTART_CHECK_S: Final = 0.5
#: How long stopping may take in addition to the drain of local replicas.
_STOP_S: Final = 60.0
#: How long an interrupted batch may take to abort its requests.
_ABORT_S: Final = 10.0


class Omni:
    """A hub in this process, on a thread of its own. The constructor returns once every stage has a replica.

    Use it in a ``with``, or close it. ``deploy`` is a deploy YAML or a DeployConfig, ``flags`` those of ``omni serve``:
    ``["--etcd-endpoints", "10.0.0.5:2379", "--hub-only"]`` uses replicas that run elsewhere. Without any, every stage
    runs here, with an embedded etcd. Raise OmniError if it can't start, or not within ``ready_timeout_s``.
    """

    def __init__(
        self,
        deploy: str | PathLike[str] | DeployConfig,
        flags: Sequence[str] = (),
        *,
        max_concurrency: int = 64,
        ready_timeout_s: float = 600.0,
    ) -> None:
        if max_concurrency < 1:
            raise ConfigError(f"max_concurrency is {max_concurrency}; it must be at least 1")
        self._config = read_flags(deploy, flags)
        self._max_concurrency = max_concurrency
        self._stopping = asyncio.Event()
        self._thread = LoopThread("omni-hub", uvloop.new_event_loop)
        #: Set on the thread: the hub once every stage can take work, or the error that keeps it from that.
        self._ready: concurrent.futures.Future[AsyncOmni] = concurrent.futures.Future()
        self._served = self._thread.start(self._serve())
        try:
            self._omni = self._wait_ready(ready_timeout_s)
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Sequence[Any] | str | Mapping[str, Any],
        sampling_params_list: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        modalities: Sequence[str] | None = None,
        timeout_s: float | None = None,
        use_tqdm: bool = True,
    ) -> list[OmniResult]:
        """Run all prompts, at most ``max_concurrency`` at once; return one result for each, in their order.

        A prompt is a text, a list of token ids, a list of chat messages, or a mapping with ``prompt``,
        ``prompt_token_ids`` or ``messages``. ``sampling_params_list`` has one mapping for each stage, in pipeline
        order, None for the defaults; it may end early. A failed prompt doesn't end the others: its result has the
        ``error``, which reading its ``text`` or ``images`` raises. ``timeout_s`` is for each prompt, from its start. An
        interrupt (Ctrl-C) aborts all requests and is raised. Raise RequestError for an error of the call itself.
        """
        if self._served.done():
            raise RequestError("this Omni is closed, or its hub has failed")
        graph = self._omni.graph
        graph.plan(modalities)
        options = BatchOptions(
            max_concurrency=self._max_concurrency,
            timeout_s=self._config.hub.request_timeout_s if timeout_s is None else timeout_s,
            params=graph.params_of(None, sampling_params_list),
            modalities=modalities,
        )
        asked = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        with _progress_bar(len(asked), shown=use_tqdm) as bar:
            return self._run(asked, options, bar)

    def close(self) -> None:
        """Stop the hub and drain its local replicas. Idempotent."""
        if not self._served.done():
            self._thread.call(self._stopping.set)
            drain_s = max((stage.drain_timeout_s for stage in self._config.local_stages), default=0.0)
            concurrent.futures.wait([self._served], drain_s + _STOP_S)
        self._thread.close()

    def __enter__(self) -> Self:
        """The same."""
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _run(self, prompts: Sequence[Any], options: BatchOptions, bar: Any) -> list[OmniResult]:
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()

        async def run() -> list[OmniResult]:
            try:
                return await run_batch(self._omni, prompts, options, bar.update)
            finally:
                ended.set_result(None)

        running = self._thread.start(run())
        try:
            # Wait in short steps: a signal that the kernel delivers to another thread doesn't end a wait of this one.
            while not running.done():
                concurrent.futures.wait([running], _CHECK_S)
            return running.result()
        except BaseException:
            # The cancelled requests abort their replicas' work before the batch has ended.
            running.cancel()
            concurrent.futures.wait([ended], _ABORT_S)
            raise

    def _wait_ready(self, timeout_s: float) -> AsyncOmni:
        try:
            return self._ready.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            stage_id = self._config.deploy.stages[0].stage_id
            raise StageUnavailableError(
                stage_id, f"not every stage of the pipeline could take work within {timeout_s:g} s"
            ) from error

    # ---- on the thread

    async def _serve(self) -> None:
        try:
            with ExitStack() as outer:
                # On this thread, because the kernel ends the processes that it starts with it.
                endpoints = self._config.endpoints or embed_etcd(outer, self._config)
                async with AsyncExitStack() as stack:
                    hub = RunningHub(self._config, endpoints, "", self._stopping)
                    started = await hub.start(stack)
                    if started is not None:
                        self._ready.set_result(await self._until_ready(*started, hub))
                        await self._until_stopped(started[1])
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            self._ready.cancel()

    async def _until_ready(self, omni: AsyncOmni, stages: LocalStages, hub: RunningHub) -> AsyncOmni:
        while not all(stage.pickable for stage in omni.stage_status()):
            for end in stages.restart_ended():
                await hub.take_back_pipeline()
                raise ConfigError(f"stage {end.stage_id} does not run here (exit code {end.code}): its log says why")
            if self._stopping.is_set():
                raise RequestError("this Omni was closed before it was ready")
            await asyncio.sleep(_CHECK_S)
        return omni

    async def _until_stopped(self, stages: LocalStages) -> None:
        while not self._stopping.is_set():
            stages.restart_ended()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _RESTART_CHECK_S)


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"flags of Omni: {message}")


def read_flags(deploy: str | PathLike[str] | DeployConfig | None, flags: Sequence[str]) -> ServeConfig:
    """The settings of a hub in this process, by the flags of ``omni serve``. ``deploy`` None: the one in force.

    Raise ConfigError, or RegistryError where the document in force is wanted and can't be read.
    """
    parser = _FlagParser(add_help=False)
    ServeCommand().add_arguments(parser)
    if isinstance(deploy, str | PathLike):
        deploy = load_deploy(Path(deploy))
    # A document that is loaded already: the flags are checked as if it had been named.
    arguments = parser.parse_args([*(("--deploy-config", "given") if deploy is not None else ()), *flags])
    has_model = arguments.model or arguments.model_flag
    if arguments.headless or has_model or arguments.api != "omni" or arguments.dry_run:
        raise ConfigError("flags of Omni: --headless, --api, --dry-run and a MODEL are for omni serve")
    if arguments.init_timeout is not None:
        raise ConfigError("flags of Omni: --init-timeout is for omni serve: give ready_timeout_s to Omni")
    check_flags(arguments)
    deploy = document_of(arguments) if deploy is None else with_flags(deploy, arguments)
    if arguments.stage_id is not None:
        deploy.stage(arguments.stage_id)
    return serve_config(arguments, deploy)


@contextmanager
def _progress_bar(total: int, *, shown: bool) -> Iterator[Any]:
    if not shown:
        yield _NoBar()
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="prompt", dynamic_ncols=True) as bar:
        yield bar


class _NoBar:
    def update(self) -> None:
        """Show nothing."""
