"""One replica process: sockets, registration and engine, started in this order and closed in the reverse.

Closing is bounded: an error in one part doesn't keep the others open, and a part that hangs doesn't keep the process.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from omni_discovery import __version__
from omni_discovery.clients import OmniCoordClientForStage
from omni_discovery.commands.flags import CURVE
from omni_discovery.curve import KeyPair
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.deploy.load import needs_start_folder
from omni_discovery.deploy.trust.judge import model_texts
from omni_discovery.errors import ConfigError
from omni_discovery.metrics.samples import ReplicaSample
from omni_discovery.processes import is_unshared, process_mark
from omni_discovery.records.handoff_addresses import KV
from omni_discovery.records.schema import DRAINED_BY_OPERATOR, FORMER_END, HubRecord, ReplicaStatus
from omni_discovery.view.known_producers import KnownProducers
from omni_discovery.wire import VERSION_CUT, FailureKind
from stage_runtime.addresses import tcp_address
from stage_runtime.config import EngineDeadError, ReplicaConfig
from stage_runtime.engine_loop.jobs import Job, Wake
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads, build_edges
from stage_runtime.engines.base import Engine, create_engine
from stage_runtime.engines.capabilities import capabilities_of
from stage_runtime.engines.trusted import trusted_stage
from stage_runtime.lifecycle import (
    Drain,
    DrainAsked,
    EngineDied,
    EngineLoaded,
    Lifecycle,
    LifeState,
    Verdict,
    WorkFinished,
    published_status,
    stalled,
)
from stage_runtime.replica.failures import describe_failure, is_known, not_loaded
from stage_runtime.replica.identity import identity, is_deterministic, model_details, params_of, voices_of
from stage_runtime.replica.load_deadline import load_deadline
from stage_runtime.replica.publisher import RecordPublisher, ReplicaSnapshot, StatusPublisher
from stage_runtime.replica.readiness import ReadinessCheck
from stage_runtime.replica.sampler import Sampler, gpu_memory, library_versions
from stage_runtime.server.handshake import ReplicaState, SecurityMismatchLog, former_hubs
from stage_runtime.server.server import ReplicaServer
from stage_runtime.status_pipe import Exiting, Loading, Registered, Up, WriteStatus, no_status
from stage_runtime.supervisor.devices import device_in_use
from stage_runtime.supervisor.restarts import EXIT_CONFIG, EXIT_DONE, EXIT_DRAINED, EXIT_FAILED

logger = logging.getLogger(__name__)


def close_part(name: str, close: Callable[[], object]) -> None:
    """Close one part. An exception is logged and not raised: the next parts and the exit code stay as they are."""
    try:
        close()
    except Exception:
        logger.exception("replica.close_failed part=%s", name)


@contextmanager
def exit_deadline(timeout_s: float, exit_code: int, end_process: Callable[[int], object] = os._exit) -> Iterator[None]:
    """End the process with ``exit_code`` if the block takes longer than ``timeout_s``: engines hang in shutdown."""

    def end() -> None:
        logger.error("replica.close_hung after_s=%g code=%d: ending without it", timeout_s, exit_code)
        logging.shutdown()
        end_process(exit_code)

    watchdog = threading.Timer(timeout_s, end)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


_FLUSH_TIMEOUT_S: Final = 2.0
#: A stalled replica ends itself so long after it said so, for the supervisor to restart it: by then hubs have moved
#: its work.
_LAST_WORD_S: Final = 1.0
#: One that loads for so many times ``load_timeout_s`` does the same.
_HOPELESS_LOADING: Final = 3.0


class _StoppedWhileLoadingError(BaseException):
    """SIGTERM came while the model was loading."""


class Replica:
    """Built and run in the main thread of its process."""

    def __init__(
        self,
        config: ReplicaConfig,
        deploy: DeployConfig,
        connect: Callable[..., RecordPublisher] = OmniCoordClientForStage,
        *,
        device: str = "cpu",
        write_status: WriteStatus = no_status,
    ) -> None:
        self._config = config
        self._write_status = write_status
        self._stage: StageConfig = trusted_stage(deploy, config.stage_id, config.bounds)
        texts = model_texts(deploy, config.stage_id)
        self._has_hub_names = bool(texts) and not needs_start_folder(deploy, config.stage_id)
        self._identity = identity(deploy, config.stage_id)
        self._connect = connect
        self._device = device
        self._lifecycle = Lifecycle()
        self._engine: Engine = create_engine(self._stage)
        #: None without encryption.
        self._keys = KeyPair.generate() if config.zmq_security == CURVE else None
        edges = build_edges(deploy, config.stage_id, config.namespace, config.bind_host, config.advertise_host)
        self._producers = KnownProducers([edge for edge in edges if edge[1] == config.stage_id])
        self._payloads = Payloads(config.stage_id, edges, time.monotonic, producers=self._producers)
        state = ReplicaState(lambda: self._lifecycle.state, lambda: self._engine.capacity)
        self._server = ReplicaServer(config.server, config.bind_host, self._keys, state, self._queue_job)
        self._loop = EngineLoop(
            self._engine, self._payloads, dict(self._stage.default_sampling_params), self._server.emit
        )
        #: When loading started; the time spent in the readiness check doesn't count.
        self._load_started_s = time.monotonic()
        self._drain = Drain(config.ack_timeout_s)
        #: Whether the server and the record know of the drain.
        self._shows_drain = False
        #: The operator has drained this replica by its control key: it stays down.
        self._drained_by_key = False
        self._security_mismatches = SecurityMismatchLog("" if self._keys is None else self._keys.public)
        self._client: RecordPublisher | None = None
        self._publisher: StatusPublisher | None = None
        #: None while it is not registered for the first time; the latest one after that.
        self._replica_id: int | None = None
        #: How many hubs the registry lists; None while that is not known.
        self._hub_count: int | None = None
        self._sampler = Sampler(self._take_sample, write_status) if config.sampled else None
        self._phase = ""
        self._readiness = ReadinessCheck(self._payloads, self._describe, lost_slots=lambda: self._server.lost_slots)

    def run(self) -> int:
        """Serve until a signal or a drain ends the replica; return the exit code."""
        signal.signal(signal.SIGTERM, self._on_stop_signal)
        signal.signal(signal.SIGUSR1, self._on_drain_signal)
        code = EXIT_FAILED
        try:
            code = self._run_to_end()
        finally:
            self._close_parts(code)
        return code

    def _run_to_end(self) -> int:
        """Register, load, serve until the last request has ended; return the exit code."""
        exit_code = EXIT_DONE
        try:
            self._begin()
            self._load_engine()
            self._serve()
        except (Exception, _StoppedWhileLoadingError) as error:  # noqa: BLE001 - it is logged there
            exit_code = self._end_by(error)
        return EXIT_DRAINED if self._drained_by_key else exit_code

    def _begin(self) -> None:
        """Open the sockets to hubs, and register as starting."""
        self._server.start()
        self._client = self._register()
        reason = f"no progress for {self._config.stall_after_s:g} s with work in hand (--stall-after)"
        self._publisher = StatusPublisher(
            self._client, self._take_snapshot, self._config.stage_id, reason, write_status=self._write_status
        )
        self._publisher.start()
        if self._sampler is not None:
            self._sampler.start()

    def _end_by(self, error: BaseException) -> int:
        """Log and publish why the replica ends; return the exit code."""
        stage_id = self._config.stage_id
        match error:
            case _StoppedWhileLoadingError():
                logger.info("replica.stopped_while_loading stage=%d", stage_id)
                self._describe(reason=DRAINED_BY_OPERATOR if self._drained_by_key else "")
                return EXIT_DONE
            case ConfigError():
                logger.error("replica.misconfigured stage=%d reason=%s", stage_id, error)
                self._fail(str(error))
                return EXIT_CONFIG
            case EngineDeadError():
                reason = describe_failure(error.__cause__) if error.__cause__ else str(error)
                logger.error("replica.engine_dead stage=%d reason=%s", stage_id, reason)
                self._fail(f"the engine died: {reason}")
                return EXIT_FAILED
            case _:
                logger.error("replica.failed stage=%d", stage_id, exc_info=error)
                self._fail(describe_failure(error))
                return EXIT_FAILED

    def _register(self) -> RecordPublisher:
        config = self._config
        fields = {
            "phase": "starting",
            "reason": f"{FORMER_END}{config.former_end[:1000]}" if config.former_end else "",
            "host": platform.node(),
            "pid": os.getpid(),
            "process": process_mark(os.getpid()) or msgspec.UNSET,
            "wire_version": VERSION_CUT,
            "device": self._device,
            **self._identity,
            "capacity": self._engine.capacity,
            "curve_public_key": "" if self._keys is None else self._keys.public,
            "labels": config.labels,
            "connectors": self._payloads.endpoints(),
        }
        return self._connect(
            config.endpoints,
            tcp_address(config.advertise_host, self._server.input_port),
            tcp_address(config.advertise_host, self._server.output_port),
            config.stage_id,
            namespace=config.namespace,
            ttl_s=config.ttl_s,
            tls=config.security.tls,
            user=config.security.user,
            password=config.security.password,
            status=ReplicaStatus.STARTING,
            fields=fields,
            may_renew=self._may_renew,
            on_hubs=self._on_hubs,
            on_revoked=self._server.set_revoked_hubs,
            on_registered=self._on_registered,
            on_lost=self._on_lost,
            on_drain=self._on_drain,
            on_acknowledged=self._on_acknowledged,
            producers=self._producers,
        )

    def _leave_shared_folder(self) -> None:
        """Leave a folder in which others could still make one that is called like a model on a model hub."""
        if self._has_hub_names and not is_unshared(Path.cwd()):
            logger.info("replica.left_folder folder=%s: others can write there", Path.cwd())
            os.chdir("/")

    def _load_engine(self) -> None:
        stage = self._stage
        logger.info("replica.loading stage=%d engine=%s model=%s", stage.stage_id, stage.engine, stage.model)
        self._readiness.wait_ready()
        self._load_started_s = time.monotonic()
        self._leave_shared_folder()
        try:
            with load_deadline(self._config.init_timeout_s, self._give_up_loading):
                self._engine.load(self._report_loading)
            self._device = device_in_use(stage, self._device)
        except ConfigError:
            raise
        except Exception as error:
            if not is_known(error):
                logger.exception("engine.load_failed")
            raise not_loaded(stage, error) from None
        known: dict[str, Any] = model_details(stage.model, self._engine)
        if voices := voices_of(self._engine):
            known["voices"] = voices
        if hosts := capabilities_of(self._engine).kv_hosts():
            known["connectors"] = {**self._payloads.endpoints(), KV: {"hosts": hosts}}
        if is_deterministic(stage, self._engine):
            known["deterministic"] = True
        if (params := params_of(stage, self._engine)) is not None:
            known["params"] = params
        if capabilities_of(self._engine).gives_partial_images():
            known["partial_images"] = True
        self._describe(
            phase="ready", progress=1.0, reason="", device=self._device, capacity=self._engine.capacity, **known
        )
        self._lifecycle.handle(EngineLoaded())
        self._write_status(Up())
        self._server.state_changed()
        took_s = time.monotonic() - self._load_started_s
        logger.info("replica.ready stage=%d capacity=%d took_s=%.1f", stage.stage_id, self._engine.capacity, took_s)

    def _give_up_loading(self, reason: str) -> None:
        logger.error("replica.load_timeout stage=%d: ending, to be started anew: %s", self._config.stage_id, reason)
        self._write_status(Exiting(reason))
        logging.shutdown()
        # The main thread, which would close everything in order, is in the load.
        os._exit(EXIT_FAILED)

    def _serve(self) -> None:
        while self._lifecycle.state in (LifeState.READY, LifeState.DRAINING):
            self._loop.turn()
            self._after_turn()

    def _after_turn(self) -> None:
        """Show what is wrong with hand-offs; while draining, see whether that is over."""
        self._readiness.check_again()
        if self._lifecycle.state is not LifeState.DRAINING:
            return
        if not self._shows_drain:
            self._shows_drain = True
            self._server.state_changed()
            if self._drained_by_key:
                self._describe(reason=DRAINED_BY_OPERATOR)
        knows_hubs = self._client is not None and self._client.awaited_hubs is not None
        match self._drain.verdict(time.monotonic(), self._server.queue_length, knows_hubs=knows_hubs):
            case Verdict.GIVE_UP:
                self._loop.fail_all(FailureKind.DRAINING, "the replica had to stop before the request was finished")
                self._lifecycle.handle(WorkFinished())
            case Verdict.DONE:
                self._warn_of_unacknowledged_drain()
                self._lifecycle.handle(WorkFinished())
            case Verdict.WAIT:
                pass

    def _warn_of_unacknowledged_drain(self) -> None:
        if not self._drain.is_acknowledged and self._client is not None:
            awaited = self._client.awaited_hubs
            hubs = "unknown, etcd does not say" if awaited is None else ",".join(sorted(awaited))
            logger.warning("replica.drain_unacknowledged stage=%d hubs=%s", self._config.stage_id, hubs)

    def _close_parts(self, exit_code: int) -> None:
        if self._sampler is not None:
            close_part("sampler", self._sampler.stop)
        # The record is withdrawn first: when the sockets close, no hub picks this replica any more.
        if self._publisher is not None:
            close_part("publisher", self._publisher.stop)
        if self._client is not None:
            close_part("registration", self._client.close)
        with exit_deadline(self._config.close_timeout_s, exit_code):
            close_part("server", lambda: self._server.close(flush_timeout_s=_FLUSH_TIMEOUT_S))
            close_part("payloads", self._payloads.close)
            close_part("engine", self._engine.close)
        counters = sorted((+self._loop.counters).items())
        text = "".join(["replica.stopped stage=%d", *(f" {name}=%d" for name, _ in counters)])
        logger.info(text, self._config.stage_id, *(count for _, count in counters))

    def _fail(self, reason: str) -> None:
        self._write_status(Exiting(reason))
        self._lifecycle.handle(EngineDied(reason))
        self._loop.fail_all(FailureKind.ENGINE, reason)
        self._describe(reason=reason[:1000])
        if self._client is not None:
            self._client.update_info(status=ReplicaStatus.ERROR)

    def _take_snapshot(self) -> ReplicaSnapshot:
        state, queue_length = self._server.life_state, self._server.queue_length
        is_stalled = self._is_stalled()
        requests = self._loop.names_of_running() if is_stalled else ""
        is_hopeless = is_stalled and self._is_hopeless()
        return ReplicaSnapshot(state, queue_length, is_stalled, is_hopeless, requests, self._drained_by_key)

    def _take_sample(self) -> ReplicaSample | None:
        """The state for metrics; None before the replica has an id."""
        client, server, meter = self._client, self._server, self._loop.meter
        if client is None or self._replica_id is None:
            return None
        used, lent = server.credits
        is_up = published_status(server.life_state, self._is_stalled()) is ReplicaStatus.UP
        return ReplicaSample(
            stage_id=self._config.stage_id,
            replica_id=self._replica_id,
            is_up=is_up,
            in_flight=server.queue_length,
            slots=self._engine.capacity,
            credits_used=used,
            credits_lent=lent,
            credits_by_hub=server.credits_by_hub,
            hubs=self._hub_count,
            lease_left_s=round(client.lease_left_s, 3),
            engine_steps=meter.steps,
            prompt_tokens=meter.prompt_tokens,
            completion_tokens=meter.completion_tokens,
            outcomes=dict(server.outcomes),
            events={name: count for name, count in dict(server.counters).items() if count},
            engine=dict(meter.engine),
            gpus=gpu_memory(),
            about={
                "engine": self._stage.engine,
                "model": self._stage.model[:200],
                "device": self._device,
                "version": __version__,
                "pid": str(os.getpid()),
                **library_versions(),
            },
        )

    def _queue_job(self, job: Job) -> None:
        self._loop.jobs.put(job)

    def _is_stalled(self) -> bool:
        return self._stands_still_for(self._config.load_timeout_s, self._config.stall_after_s)

    def _is_hopeless(self) -> bool:
        return self._stands_still_for(
            _HOPELESS_LOADING * self._config.load_timeout_s, self._config.stall_after_s + _LAST_WORD_S
        )

    def _stands_still_for(self, loading_s: float, working_s: float) -> bool:
        progress, now_s = self._loop.progress, time.monotonic()
        if self._lifecycle.state is LifeState.STARTING:
            return stalled(not self._readiness.is_waiting, now_s, self._load_started_s, loading_s)
        return stalled(progress.busy, now_s, progress.at_s, working_s)

    def _may_renew(self) -> bool:
        return not self._is_stalled()

    def _report_loading(self, phase: str, progress: float) -> None:
        if phase != self._phase:
            self._phase = phase
            self._write_status(Loading(phase))
            after_s = time.monotonic() - self._load_started_s
            logger.info("replica.phase stage=%d phase=%s after_s=%.1f", self._config.stage_id, phase, after_s)
        self._describe(phase=phase, progress=max(0.0, min(1.0, progress)))

    def _describe(self, **fields: Any) -> None:
        if self._client is not None:
            self._client.describe(**fields)

    def _on_hubs(self, hubs: Mapping[str, HubRecord]) -> None:
        self._hub_count = len(hubs)
        self._security_mismatches.warn_of_hubs(hubs)
        public_key = "" if self._keys is None else self._keys.public
        if former := former_hubs(public_key, hubs, self._server.revoked_hubs):
            self._server.take_long_frames(former[0])
        self._server.set_allowed_hubs({hub_id: hub.curve_public_key for hub_id, hub in hubs.items()})

    def _on_registered(self, replica_id: int, epoch: int) -> None:
        name = f"{self._config.stage_id}/{replica_id}"
        self._write_status(Registered(name, epoch))
        self._replica_id = replica_id
        self._server.set_replica_name(name)
        self._server.set_epoch(epoch)

    def _on_lost(self, *details: object) -> None:
        # Requests in flight go on; the client registers again by itself and logs it.
        logger.warning("replica.registration_lost stage=%d", self._config.stage_id)

    def _on_drain(self) -> None:
        # The lifecycle and the loading of a model belong to the main thread, which only a signal can interrupt.
        logger.info("replica.drain_asked stage=%d by=control-key", self._config.stage_id)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _on_acknowledged(self) -> None:
        self._drain.is_acknowledged = True
        self._loop.jobs.put(Wake())

    def _on_drain_signal(self, number: int, frame: object) -> None:
        self._drained_by_key = True
        self._start_drain(float("inf"))

    def _on_stop_signal(self, number: int, frame: object) -> None:
        # The first signal waits up to drain_timeout_s for the requests in flight; the second fails them at once.
        self._start_drain(0.0 if self._drain.is_bounded else self._config.drain_timeout_s)

    def _start_drain(self, timeout_s: float) -> None:
        is_loading = self._lifecycle.state is LifeState.STARTING
        self._lifecycle.handle(DrainAsked())
        if is_loading:
            raise _StoppedWhileLoadingError
        self._drain.request(time.monotonic(), timeout_s)
        self._loop.jobs.put(Wake())
