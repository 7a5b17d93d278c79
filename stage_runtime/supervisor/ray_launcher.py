"""Replicas as actors of a Ray cluster: each in a bundle of one placement group, with the bundle's devices.

The actors belong to the supervisor: Ray ends them with it, however it ends, and each ends its replica.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import threading
from typing import Any, Final

import msgspec

from omni_discovery.deploy.document import StageConfig
from omni_discovery.deploy.engine_args import group_size
from omni_discovery.deploy.topology import device_names
from omni_discovery.errors import ConfigError
from stage_runtime.config import ReplicaConfig
from stage_runtime.supervisor.ray_actor import ReplicaActor
from stage_runtime.supervisor.restarts import EXIT_DONE, EXIT_FAILED
from stage_runtime.supervisor.supervisor import Child

logger = logging.getLogger(__name__)

_FOLLOW_S: Final = 5.0
#: Calls that one actor answers at the same time: start, follow and signals.
_CALLS: Final = 8


class RayChild:
    """A replica on the cluster; a thread here fetches its output and exit code. Its process id is another machine's."""

    pid = 0

    def __init__(self, ray: Any, actor: Any, content: bytes) -> None:
        self._ray = ray
        self._actor = actor
        self._code: int | None = None
        self._is_placed = False
        self.output_fd, self._write_fd = os.pipe()
        threading.Thread(target=self._follow, args=(content,), name="ray-replica", daemon=True).start()

    def poll(self) -> int | None:
        """See Child."""
        return self._code

    def send_signal(self, number: int) -> None:
        """See Child."""
        if self._code is not None:
            return
        if number == signal.SIGKILL or not self._is_placed:
            self._ray.kill(self._actor)
        else:
            self._actor.signal.remote(int(number))

    def _follow(self, content: bytes) -> None:
        code = EXIT_FAILED
        try:
            self._ray.get(self._actor.start.remote(content))
            self._is_placed = True
            ended: int | None = None
            while ended is None:
                output, ended = self._ray.get(self._actor.follow_output.remote(_FOLLOW_S))
                self._print(output)
            code = ended
        except self._ray.exceptions.RayActorError:
            # The machine is lost, or this launcher has killed the actor.
            code = EXIT_FAILED if self._is_placed else EXIT_DONE
            self._print(b"omni: the Ray actor of this replica has ended\n")
        except self._ray.exceptions.RayError as error:
            self._print(f"omni: Ray could not run this replica: {error}\n".encode())
        finally:
            os.close(self._write_fd)
            self._code = code
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(self._actor)

    def _print(self, content: bytes) -> None:
        # The supervisor closes the read end only after it has seen the exit code.
        while content:
            content = content[os.write(self._write_fd, content) :]


class RayLauncher:
    """Starts replicas in the bundles of one placement group."""

    phase = ""

    def __init__(self, stage: StageConfig, count: int, address: str, wait_s: float) -> None:
        """Connect to the cluster and reserve the bundles. Raise ConfigError if it has no room within ``wait_s``."""
        self._ray = _import_ray()
        self._demand = bundle_of(stage)
        try:
            self._ray.init(
                address=address or "auto", namespace="omni", log_to_driver=False, logging_level=logging.WARNING
            )
        except (ConnectionError, self._ray.exceptions.RayError, ValueError) as error:
            reason, _, _ = str(error).partition("\n")
            raise ConfigError(
                f"no Ray cluster answers at {address or 'this machine'} ({reason}); "
                "start one with 'ray start --head', or say where it is with --ray-address HOST:PORT"
            ) from error
        placing = importlib.import_module("ray.util.placement_group")
        self._remove_group = placing.remove_placement_group
        self._group = placing.placement_group([self._demand] * count, strategy=stage.runtime.on_ray.strategy)
        if self._group.wait(1):
            return
        asked = f"{count} x {_resources_text(self._demand)} ({stage.runtime.on_ray.strategy})"
        has = _resources_text({name: size for name, size in self._ray.cluster_resources().items() if ":" not in name})
        logger.warning("ray.waiting stage=%d wants=%s cluster_has=%s", stage.stage_id, asked, has)
        if not self._group.wait(wait_s):
            self.close()
            raise ConfigError(
                f"stage {stage.stage_id}: the Ray cluster had no room for {asked} in {wait_s:g} s, it has {has}; "
                "add machines, or ask for less with runtime.ray and --omni-dp-size-local"
            )

    def start(self, config: ReplicaConfig, environment: dict[str, str]) -> Child:
        """See Launcher. The replica gets the environment of the actor's machine; ``environment`` is not used."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        options = {
            "num_cpus": self._demand.get("CPU", 0),
            "num_gpus": self._demand.get("GPU", 0),
            "resources": {name: size for name, size in self._demand.items() if name not in ("CPU", "GPU")},
            "max_concurrency": _CALLS,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=config.ordinal
            ),
        }
        actor = self._ray.remote(ReplicaActor).options(**options).remote()
        return RayChild(self._ray, actor, msgspec.json.encode(config))

    def close(self) -> None:
        """See Launcher."""
        if self._ray.is_initialized():
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._remove_group(self._group)
            self._ray.shutdown()


def bundle_of(stage: StageConfig) -> dict[str, float]:
    """The resources of one replica, by Ray's names. Raise ConfigError if they are none."""
    asked = stage.runtime.on_ray
    gpus = asked.num_gpus
    if gpus is None:
        gpus = group_size(stage) if device_names(stage) else 0
    wanted = {"CPU": asked.num_cpus, "GPU": gpus, **asked.resources}
    resources = {name: float(size) for name, size in wanted.items() if size}
    if not resources:
        raise ConfigError(
            f"stage {stage.stage_id}: runtime.ray asks for nothing; give it num_cpus, num_gpus or resources"
        )
    return resources


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"--worker-backend ray needs Ray: pip install 'omni-discovery[ray]' ({error})") from error


def _resources_text(resources: dict[str, float]) -> str:
    return " ".join(f"{name}={size:g}" for name, size in sorted(resources.items())) or "nothing"
