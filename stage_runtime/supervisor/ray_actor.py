"""The Ray actor on a machine of the cluster: the parent of one replica process.

Ray imports this module by name on that machine, without the launcher's.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from omni_discovery.deploy.document import decode_deploy
from omni_discovery.errors import ConfigError
from stage_runtime.addresses import find_hosts
from stage_runtime.config import ReplicaConfig
from stage_runtime.private_folders import remove_left_folders
from stage_runtime.supervisor.environment import placed_environment, stage_environment
from stage_runtime.supervisor.launch import SpawnLauncher
from stage_runtime.supervisor.restarts import EXIT_CONFIG, EXIT_FAILED
from stage_runtime.supervisor.supervisor import Child

#: Bound of the output that is buffered for a supervisor that is slow to fetch it.
_MOST_OUTPUT_BYTES: Final = 1 << 20
_POLL_S: Final = 0.1


class ReplicaActor:
    """Starts one replica process, buffers its output, and knows its exit code. Methods may run at the same time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._output = bytearray()
        self._code: int | None = None
        self._child: Child | None = None

    def start(self, content: bytes) -> None:
        """Start the replica with a ReplicaConfig as JSON. It binds the address from which this machine reaches etcd."""
        # On a thread that lives until the replica has ended: the kernel ends a child with the thread that started it,
        # and Ray's threads may end at any time.
        config = msgspec.json.decode(content, type=ReplicaConfig)
        threading.Thread(target=self._run_replica, args=(config,), name="replica", daemon=True).start()

    def follow_output(self, timeout_s: float) -> tuple[bytes, int | None]:
        """The output since the last call and the exit code, or None; waits up to ``timeout_s`` for either."""
        with self._changed:
            self._changed.wait_for(lambda: self._output or self._code is not None, timeout_s)
            output = bytes(self._output)
            self._output.clear()
            self._changed.notify_all()
            return output, self._code

    def signal(self, number: int) -> None:
        """Send the replica a signal. Does nothing if the replica has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._child is not None or self._code is not None, 10.0)
        if self._child is not None:
            self._child.send_signal(number)

    def _run_replica(self, config: ReplicaConfig) -> None:
        code = EXIT_FAILED
        try:
            bind_host, advertise_host = find_hosts(config.endpoints)
            config = msgspec.structs.replace(
                config, bind_host=bind_host, advertise_host=advertise_host, parent_pid=os.getpid()
            )
            code = self._run(config)
        except ConfigError as error:
            code = EXIT_CONFIG
            self._print(f"omni: {error}\n".encode())
        except OSError as error:
            self._print(f"omni: the replica could not be started: {error}\n".encode())
        finally:
            with self._changed:
                self._code = code
                self._changed.notify_all()

    def _run(self, config: ReplicaConfig) -> int:
        # The supervisor's folder need not be on this machine.
        os.chdir(Path.home())
        child = SpawnLauncher().start(config, _environment(config))
        with self._changed:
            self._child = child
            self._changed.notify_all()
        os.set_blocking(child.output_fd, False)
        try:
            while (code := child.poll()) is None:
                if not self._forward(child.output_fd):
                    time.sleep(_POLL_S)
            while self._forward(child.output_fd):
                pass
            return code
        finally:
            os.close(child.output_fd)
            remove_left_folders()

    def _forward(self, output_fd: int) -> bool:
        """Move some output from the pipe to the buffer; return whether there was any."""
        try:
            content = os.read(output_fd, 65536)
        except BlockingIOError:
            return False
        self._print(content)
        return bool(content)

    def _print(self, content: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._output) < _MOST_OUTPUT_BYTES)
            self._output += content
            self._changed.notify_all()


def _environment(config: ReplicaConfig) -> dict[str, str]:
    """The environment that Ray has set for the actor, with its devices, and the engine's settings."""
    stage = decode_deploy(config.known_pipeline.encode(), "the pipeline").stage(config.stage_id)
    settings = stage_environment(stage, Path(stage.model).expanduser().exists(), config.advertise_host)
    return placed_environment(dict(os.environ), stage, settings, config.ordinal)
