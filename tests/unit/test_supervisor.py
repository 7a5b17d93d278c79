"""The supervisor where a replica can't even be started."""

from __future__ import annotations

import logging
import os

import pytest

from omni_discovery.deploy import StageConfig
from stage_runtime.config import ReplicaConfig, SupervisorConfig
from stage_runtime.launch import replica_environment
from stage_runtime.process_manager import Child, Supervisor, stage_environment
from stage_runtime.restarts import EXIT_CONFIG, EXIT_DRAINED
from tests.support.hub_fakes import ONE_STAGE, deploy_of


class _Running:
    def __init__(self) -> None:
        self.output_fd, self.write_fd = os.pipe()

    def poll(self) -> int | None:
        return None

    def send_signal(self, number: int) -> None:
        """Nothing to send it to."""


class _Launcher:
    """Starts the first replica, and then the machine has no process left to give."""

    def __init__(self) -> None:
        self.started: list[_Running] = []

    def start(self, config: ReplicaConfig, environment: dict[str, str]) -> Child:
        if self.started:
            raise BlockingIOError("Resource temporarily unavailable")
        self.started.append(_Running())
        return self.started[0]

    def close(self) -> None:
        """Nothing to give back."""


def test_a_replica_that_can_not_be_started_is_tried_again_and_costs_the_others_nothing() -> None:
    replica = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:1", namespace="default")
    supervisor = Supervisor(
        SupervisorConfig(replica=replica, count=2), deploy_of(ONE_STAGE), _Launcher(), lambda ordinal: {}
    )
    for slot in supervisor._slots:
        supervisor._start(slot, 100.0)
    first, second = supervisor._slots
    assert first.child is not None
    assert second.child is None
    assert 100.0 < second.start_at_s < float("inf")
    assert second.gave_up_with is None


def test_a_replica_that_closed_its_output_and_runs_on_does_not_keep_the_supervisor_busy() -> None:
    replica = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:1", namespace="default")
    launcher = _Launcher()
    supervisor = Supervisor(SupervisorConfig(replica=replica), deploy_of(ONE_STAGE), launcher, lambda ordinal: {})
    (slot,) = supervisor._slots
    supervisor._start(slot, 100.0)
    (child,) = launcher.started
    assert child.output_fd in supervisor._selector.get_map()
    os.close(child.write_fd)
    supervisor._forward(slot)
    assert child.output_fd not in supervisor._selector.get_map()
    supervisor._forward(slot)


@pytest.mark.parametrize(
    ("code", "told", "level"),
    [(EXIT_DRAINED, "supervisor.drained", logging.INFO), (EXIT_CONFIG, "supervisor.gave_up", logging.ERROR)],
)
def test_a_replica_that_an_operator_has_drained_is_not_said_to_be_given_up(
    caplog: pytest.LogCaptureFixture, code: int, told: str, level: int
) -> None:
    caplog.set_level(logging.INFO)
    replica = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:1", namespace="default")
    supervisor = Supervisor(SupervisorConfig(replica=replica), deploy_of(ONE_STAGE), _Launcher(), lambda ordinal: {})
    supervisor._ended(supervisor._slots[0], code)
    (record,) = caplog.records
    assert (record.getMessage().split()[0], record.levelno) == (told, level)


def test_replicas_that_pass_kv_on_get_ports_of_their_own() -> None:
    """1. two prefill replicas of a machine are asked for their KV at different ports, by the machine's own name
    2. where the operator set a port, they count up from it; a stage that passes nothing on gets none
    """
    stage = StageConfig(
        stage_id=0, engine="vllm", engine_args={"kv_transfer_config": {"kv_connector": "NixlConnector"}}
    )
    settings = stage_environment(stage, True, "10.0.0.7")
    assert settings["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"
    port = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    free = [replica_environment({}, stage, settings, 2, ordinal)[port] for ordinal in (0, 1)]
    assert all(0 < int(each) < 65536 for each in free)
    fixed = [replica_environment({port: "5600"}, stage, settings, 2, ordinal)[port] for ordinal in (0, 1)]
    assert fixed == ["5600", "5601"]
    plain = StageConfig(stage_id=0, engine="vllm")
    environment = replica_environment({}, plain, stage_environment(plain, True, "10.0.0.7"), 1, 0)
    assert not [name for name in environment if "NIXL" in name]
