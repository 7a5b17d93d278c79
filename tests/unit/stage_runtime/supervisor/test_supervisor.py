"""The supervisor where a replica can't even be started."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.deploy.document import StageConfig
from omni_discovery.logs.lines import json_line
from omni_discovery.logs.setup import LogOptions
from omni_discovery.metrics.samples import ReplicaSample, Sample, SupervisorSample, encode_sample
from omni_discovery.stories import Waits, read_waits
from stage_runtime.config import ReplicaConfig, SupervisorConfig
from stage_runtime.supervisor import supervisor as process_manager
from stage_runtime.supervisor.environment import replica_environment, stage_environment
from stage_runtime.supervisor.relay import LineSource
from stage_runtime.supervisor.restarts import EXIT_CONFIG, EXIT_DRAINED, EXIT_FAILED, RestartPolicy, Restarts
from stage_runtime.supervisor.supervisor import Child, Supervisor
from tests.support.hub_fakes import ONE_STAGE, deploy_of


class _Running:
    pid = 4711

    def __init__(self) -> None:
        self.output_fd, self.write_fd = os.pipe()

    def poll(self) -> int | None:
        return None

    def send_signal(self, number: int) -> None:
        """Nothing to send it to."""


class _Launcher:
    """Starts the first replica, and then the machine has no process left to give."""

    phase = ""

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
    assert second.former_end == "it could not be started: Resource temporarily unavailable"
    assert not second.is_hopeless


def test_a_replica_that_waits_for_its_next_try_is_told_with_how_the_last_one_ended(tmp_path: Path) -> None:
    home = tmp_path / "omni"
    home.mkdir(mode=0o700)
    replica = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:1", namespace="default")
    waits = Waits(home, "default", replica.endpoints)
    config = SupervisorConfig(replica=replica, count=2)
    supervisor = Supervisor(config, deploy_of(ONE_STAGE), _Launcher(), lambda ordinal: {}, waits=waits)
    for slot in supervisor._slots:
        supervisor._start(slot, 100.0)
    (wait,) = read_waits(home, "default")
    assert wait.who == "the supervisor of stage 0"
    assert wait.reason.endswith("its last process: it could not be started: Resource temporarily unavailable")
    supervisor._launcher = _Launcher()
    supervisor._start(supervisor._slots[1], 200.0)
    assert read_waits(home, "default") == []


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


@pytest.mark.attack("Z22")
def test_a_replica_that_prints_without_a_pause_does_not_keep_the_supervisor_from_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. it is read from once in a turn
    2. it has ended, and a process that it left prints on: what it can have left itself is read, and no more
    """
    supervisor = _supervisor(_Launcher())
    (slot,) = supervisor._slots
    supervisor._start(slot, 100.0)
    reads: list[int] = []

    def printed_on(_: int, size_bytes: int) -> bytes:
        reads.append(size_bytes)
        assert len(reads) < 100, "it is read from for ever"
        return b"x\n"

    monkeypatch.setattr(process_manager.os, "read", printed_on)
    supervisor._forward(slot)
    assert len(reads) == 1
    assert isinstance(slot.child, _Running)
    monkeypatch.setattr(slot.child, "poll", lambda: EXIT_FAILED)
    supervisor._reap(slot)
    assert sum(reads[1:]) == 1 << 20
    assert slot.child is None


class _Ended(_Running):
    """One that has printed some lines and ended."""

    def __init__(self, code: int, printed: bytes) -> None:
        super().__init__()
        self.code = code
        os.write(self.write_fd, printed)
        os.close(self.write_fd)

    def poll(self) -> int | None:
        return self.code


class _Ending:
    """Each replica that it starts ends at once, as it is told for each ordinal."""

    phase = ""

    def __init__(self, *ends: tuple[int, bytes]) -> None:
        self.ends = ends
        self.former_ends: list[str] = []

    def start(self, config: ReplicaConfig, environment: dict[str, str]) -> Child:
        self.former_ends.append(config.former_end)
        return _Ended(*self.ends[config.ordinal])

    def close(self) -> None:
        """Nothing to give back."""


def _supervisor(launcher: _Launcher | _Ending, count: int = 1, **more: Any) -> Supervisor:
    replica = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:1", namespace="default")
    return Supervisor(
        SupervisorConfig(replica=replica, count=count), deploy_of(ONE_STAGE), launcher, lambda ordinal: {}, **more
    )


@pytest.mark.parametrize(
    ("code", "told", "level"),
    [
        (EXIT_DRAINED, "supervisor.drained", logging.INFO),
        (EXIT_CONFIG, "supervisor.not_kept_up", logging.ERROR),
        (-9, "supervisor.restarting", logging.WARNING),
    ],
)
def test_each_end_is_told_for_what_it_is(caplog: pytest.LogCaptureFixture, code: int, told: str, level: int) -> None:
    caplog.set_level(logging.INFO)
    supervisor = _supervisor(_Launcher())
    supervisor._handle_end(supervisor._slots[0], code)
    (record,) = caplog.records
    assert (record.getMessage().split()[0], record.levelno) == (told, level)


def test_a_crash_loop_is_tried_on_while_another_replica_is_well_and_ends_all_when_none_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. replica 1 always ends with a reason; each new life is told how the one before ended
    2. after six ends it is in a crash loop: an error says so, and it is tried again, since replica 0 runs
    3. replica 0 finds its configuration wrong: nobody is left, the exit code is the worst, and the log has both reasons
    """
    monkeypatch.setattr(process_manager, "Restarts", partial(Restarts, RestartPolicy(0.001, 0.002)))
    told = b"hello\nhalf a line\x00omni end the engine died: boom\n"
    launcher = _Ending((2, b"\x00omni end no such model\n"), (1, told))
    words: list[tuple[str, str]] = []
    supervisor = _supervisor(launcher, 2, leave_word=lambda why: words.append((why, caplog.text)))
    first, second = supervisor._slots
    first.child = _Running()
    first.start_at_s = float("inf")
    for _ in range(7):
        supervisor._start(second, 0.0)
        supervisor._reap(second)
    assert second.is_hopeless
    assert not first.is_hopeless
    assert second.start_at_s < float("inf")
    assert launcher.former_ends[:2] == ["", "the engine died: boom"]
    looping = "it ended 6 times in a row soon after its start: the engine died: boom"
    assert launcher.former_ends[6] == looping
    assert looping in caplog.text
    first.child, first.start_at_s = None, 0.0
    assert supervisor.run() == EXIT_CONFIG
    assert "supervisor.gave_up stage=0 code=2: its configuration is wrong: no such model; it ended" in caplog.text
    ((why, before),) = words
    assert why.startswith("its configuration is wrong: no such model; it ended 7 times")
    assert "supervisor.gave_up" not in before, "that is the last line of the log"


def test_a_process_that_was_never_registered_is_named_by_the_one_before_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. replica 0/3 ends; all that come after it end before they have a name
    2. every line says that they were to follow 0/3, the last one, too
    """
    monkeypatch.setattr(process_manager, "Restarts", partial(Restarts, RestartPolicy(0.001, 0.002)))
    launcher = _Ending((1, b"\x00omni name 0/3\n"))
    supervisor = _supervisor(launcher)
    (slot,) = supervisor._slots
    supervisor._start(slot, 0.0)
    supervisor._reap(slot)
    launcher.ends = ((1, b""),)
    assert supervisor.run() == EXIT_FAILED
    assert "supervisor.restarting stage=0 replica=0/3 code=1 " in caplog.messages[0]
    assert all(" pid=4711 was=0/3 code=1 " in line for line in caplog.messages[1:-1])
    assert caplog.messages[-2].startswith("supervisor.not_kept_up stage=0 ")
    assert caplog.messages[-1].startswith("supervisor.gave_up stage=0 replicas=0/3 code=1: ")


def test_that_it_drains_is_told_once_to_who_waits_for_its_devices() -> None:
    told: list[str] = []
    replica = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:1", namespace="default")
    config = SupervisorConfig(replica=replica)
    supervisor = Supervisor(config, deploy_of(ONE_STAGE), _Launcher(), lambda ordinal: {}, lambda: told.append("leave"))
    supervisor._stop(0.0)
    supervisor._stop(1.0)
    assert told == ["leave"]


def test_the_time_to_load_is_no_service(capfd: pytest.CaptureFixture[str]) -> None:
    """A model that ends whenever it is loaded is in a crash loop, however long it loads. What it tells is no text."""
    supervisor = _supervisor(_Ending((1, b"a\n\x00omni up\nb")))
    (slot,) = supervisor._slots
    for _ in range(6):
        supervisor._start(slot, -1000.0)
        assert slot.up_since_s is None
        supervisor._reap(slot)
        assert slot.up_since_s is not None
    assert slot.is_hopeless
    assert capfd.readouterr().err.splitlines()[:2] == ["[stage 0 pid 4711] a", "[stage 0 pid 4711] b"]


def test_lines_bear_the_claimed_id_from_the_registration_on(capfd: pytest.CaptureFixture[str]) -> None:
    """1. before it is registered, the process is named; 2. then the id, also where the record gets another one
    3. a new process starts without a name
    """
    printed = b"a\n\x00omni name 0/1\nb\n\x00omni name 0/7\nc\n"
    supervisor = _supervisor(_Ending((1, printed)))
    (slot,) = supervisor._slots
    for _ in range(2):
        supervisor._start(slot, 0.0)
        supervisor._reap(slot)
    lines = ["[stage 0 pid 4711] a", "[replica 0/1] b", "[replica 0/7] c"]
    assert capfd.readouterr().err.splitlines() == lines * 2


def test_with_json_what_a_replica_prints_is_an_object_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Its own lines pass as they are; a library's text is wrapped, and says whose it is; empty lines are left out."""
    own = json_line(logging.makeLogRecord({"msg": "a.b x=1", "levelname": "INFO"}), {"pid": 1})
    printed = f"{own}\n\nImporting\n\0omni name 0/1\n{{nothing\n".encode()
    replica = ReplicaConfig(
        stage_id=0, endpoints="127.0.0.1:1", namespace="default", log=LogOptions(level="debug", format="json")
    )
    launcher = _Ending((1, printed))
    supervisor = Supervisor(SupervisorConfig(replica=replica), deploy_of(ONE_STAGE), launcher, lambda ordinal: {})
    (slot,) = supervisor._slots
    supervisor._start(slot, 0.0)
    supervisor._reap(slot)
    first, *others = capfd.readouterr().err.splitlines()
    assert first == own
    about = [(each["message"], each["pid"], each["stage"], each.get("replica")) for each in map(json.loads, others)]
    assert about == [("Importing", 4711, 0, None), ("{nothing", 4711, 0, "0/1")]


def test_a_supervisor_without_a_hub_says_when_its_stage_can_serve(caplog: pytest.LogCaptureFixture) -> None:
    """1. at first it waits, and says for what; 2. one that is up and has a name makes it ready; 3. its end ends that"""
    caplog.set_level(logging.INFO)
    launcher = _Launcher()
    supervisor = _supervisor(launcher, 2)
    first, second = supervisor._slots
    launcher.phase = "importing torch"
    supervisor._start_due(0.0)
    supervisor._tell_readiness(time.monotonic())
    supervisor._handle_line(first, b"\0omni phase loading the model")
    supervisor._handle_line(first, b"\0omni up")
    supervisor._tell_readiness(time.monotonic())
    supervisor._handle_line(first, b"\0omni name 0/4")
    supervisor._tell_readiness(time.monotonic())
    first.child = None
    supervisor._tell_readiness(time.monotonic())
    assert second.child is None
    lines = [re.sub(r"after_s=[\d.]+", "after_s=T", record.getMessage()) for record in caplog.records]
    assert [line for line in lines if "not_started" not in line and "restarting" not in line] == [
        "supervisor.starting stage=0 replicas=1: importing torch",
        "stage.waiting stage=0 after_s=T: 1 importing torch, 1 waiting for another try",
        "stage.ready stage=0 replicas=0/4 up=1 of=2 after_s=T",
        "stage.not_ready stage=0: 1 not running, 1 waiting for another try",
    ]


def test_a_supervisor_under_a_hub_leaves_that_to_the_hub(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    replica = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:1", namespace="default")
    config = SupervisorConfig(replica=replica, parent_pid=os.getpid())
    supervisor = Supervisor(config, deploy_of(ONE_STAGE), _Launcher(), lambda ordinal: {})
    supervisor._tell_readiness(time.monotonic())
    assert not caplog.records


def test_what_the_zygote_prints_comes_out_line_by_line(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    replica = ReplicaConfig(stage_id=3, endpoints="127.0.0.1:1", namespace="default")
    config = SupervisorConfig(replica=replica)
    launcher = _Launcher()
    supervisor = Supervisor(config, deploy_of(ONE_STAGE), launcher, lambda ordinal: {}, shared_output_fd=reading)
    shared = supervisor._shared
    assert shared is not None
    os.write(writing, b"Triton is not")
    assert shared.read_lines() == []
    assert shared.read_lines() == []
    os.write(writing, b" installed\nhalf")
    for line in shared.read_lines():
        supervisor._print(LineSource(3), line)
    os.close(writing)
    os.close(reading)
    assert capfd.readouterr().err == "[stage 3] Triton is not installed\n"


def sampled(replica_id: int) -> bytes:
    """What a replica writes to tell of itself."""
    return b"\x00omni sample " + encode_sample(ReplicaSample(stage_id=0, replica_id=replica_id)) + b"\n"


def test_samples_are_passed_on_and_not_printed_and_a_drained_replica_is_not_wanted(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """1. two replicas tell of themselves; 2. one crashes, is restarted and counts; 3. the other is drained
    4. the supervisor stops: it wants none
    """
    exported: list[Sample] = []
    replica = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:1", namespace="default")
    launcher = _Ending((1, b"a\n" + sampled(1)), (EXIT_DRAINED, b"b\n" + sampled(0)))
    config = SupervisorConfig(replica=replica, count=2)
    supervisor = Supervisor(config, deploy_of(ONE_STAGE), launcher, lambda ordinal: {}, export=exported.append)
    assert supervisor._replica_config.sampled

    def own() -> tuple[int, int, tuple[int, ...]]:
        supervisor._export_at_s = 0.0
        supervisor._export_own(1.0)
        sample = exported[-1]
        assert isinstance(sample, SupervisorSample)
        return sample.wanted, sample.restarts, sample.replica_ids

    for slot in supervisor._slots:
        supervisor._start(slot, 0.0)
        supervisor._forward(slot)
    assert [each.replica_id for each in exported if isinstance(each, ReplicaSample)] == [1, 0]
    assert own() == (2, 0, (1, 0))
    first, second = supervisor._slots
    supervisor._reap(first)
    assert own() == (2, 1, (0,))
    supervisor._reap(second)
    assert own() == (1, 1, ())
    supervisor._stop(0.0)
    assert own() == (0, 1, ())
    printed = [line.partition("] ")[2] for line in capfd.readouterr().err.splitlines() if line.startswith("[")]
    assert printed == ["a", "b"]


def test_without_anybody_to_show_them_to_no_samples_are_taken() -> None:
    supervisor = _supervisor(_Launcher())
    assert not supervisor._replica_config.sampled
    supervisor._export_own(1.0)


def test_a_line_that_can_not_be_printed_is_lost_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = _supervisor(_Ending((1, b"one\ntwo\n")))
    (slot,) = supervisor._slots
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        supervisor._start(slot, 0.0)
        supervisor._reap(slot)
        monkeypatch.undo()
        # What its buffer kept can't be written when it is closed, either.
        with suppress(OSError):
            full.close()
    assert slot.former_end == "it ended with code 1"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "it ended with code 1"),
        (-11, "it was ended by SIGSEGV"),
        (-9, "it was ended by SIGKILL, as the kernel does where memory is short"),
        (-99, "it was ended by signal 99"),
    ],
)
def test_an_end_without_words_is_told_by_its_code(code: int, said: str) -> None:
    assert process_manager.how_it_ended(code) == said


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
    said = {"kv_connector": "MooncakeConnector", "kv_connector_extra_config": {"mooncake_bootstrap_port": 25201}}
    assert "VLLM_HOST_IP" not in settings
    stage = StageConfig(stage_id=0, engine="vllm", engine_args={"kv_transfer_config": said})
    # Mooncake's other ports have no setting for the address but vLLM's own.
    assert stage_environment(stage, True, "10.0.0.7")["VLLM_HOST_IP"] == "10.0.0.7"
    port = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
    assert [replica_environment({}, stage, {}, 2, each)[port] for each in (0, 1)] == ["25201", "25202"]
    assert replica_environment({port: "5600"}, stage, {}, 2, 1)[port] == "5601"
    plain = StageConfig(stage_id=0, engine="vllm")
    environment = replica_environment({}, plain, stage_environment(plain, True, "10.0.0.7"), 1, 0)
    assert not [name for name in environment if "NIXL" in name]


@pytest.mark.attack("F1")
def test_the_ranks_of_a_replica_on_one_host_meet_on_loopback() -> None:
    """1. gloo is told to listen on loopback, in both engines that have process groups, however many ranks there are
    2. ranks on other hosts are left to the network; what the operator's environment says wins
    """

    def interface(engine: str, args: dict[str, object], base: dict[str, str] | None = None) -> str | None:
        stage = StageConfig(stage_id=0, engine=engine, engine_args=args)
        return replica_environment(base or {}, stage, stage_environment(stage, True), 1, 0).get("GLOO_SOCKET_IFNAME")

    for engine in ("vllm", "vllm-omni"):
        assert interface(engine, {}) == "lo"
        assert interface(engine, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}) == "lo"
    assert interface("vllm", {"distributed_executor_backend": "ray"}) is None
    assert interface("vllm", {"nnodes": 2, "master_addr": "10.0.0.7"}) is None
    assert interface("vllm", {"data_parallel_address": "10.0.0.7"}) is None
    assert interface("echo", {}) is None
    assert interface("vllm", {}, {"GLOO_SOCKET_IFNAME": "eth1"}) == "eth1"


class _WithoutDescriptors(_Launcher):
    """Has none left."""

    def start(self, config: ReplicaConfig, environment: dict[str, str]) -> Child:
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.attack("D2")
def test_a_replica_without_a_descriptor_for_its_start_is_tried_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = _supervisor(_WithoutDescriptors())
    (slot,) = supervisor._slots
    for turn in range(20):
        supervisor._start_due(100.0 * turn)
    assert caplog.text.count("supervisor.not_started stage=0: [Errno 24] Too many open files") == 20
    assert not slot.is_hopeless
    assert slot.start_at_s < float("inf")


def test_what_ended_processes_left_stops_no_start_and_is_looked_for_until_it_is_gone() -> None:
    """1. at the start it can't be removed: replicas start, and it is tried again after a pause, until it is gone
    2. a replica ends: it is looked for again
    """
    answers, asked = [False, False, True, True], []

    def tidy() -> bool:
        asked.append(now_s)
        return answers.pop(0)

    replica = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:1", namespace="default")
    launcher = _Ending((1, b""))
    supervisor = Supervisor(
        SupervisorConfig(replica=replica), deploy_of(ONE_STAGE), launcher, lambda ordinal: {}, tidy=tidy
    )
    (slot,) = supervisor._slots
    for now_s in (100.0, 110.0, 130.0, 160.0, 200.0):
        supervisor._tidy_due(now_s)
        supervisor._start_due(now_s)
        assert slot.child is not None
    assert asked == [100.0, 130.0, 160.0]
    supervisor._reap(slot)
    supervisor._tidy_due(now_s)
    assert asked[3:] == [200.0]


def test_what_is_still_somebodys_at_the_start_is_looked_for_once_more() -> None:
    asked: list[float] = []
    replica = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:1", namespace="default")
    config = SupervisorConfig(replica=replica)

    def tidy() -> bool:
        asked.append(now_s)
        return True

    supervisor = Supervisor(config, deploy_of(ONE_STAGE), _Ending((1, b"")), lambda ordinal: {}, tidy=tidy)
    for now_s in (100.0, 110.0, 130.0, 160.0, 200.0):
        supervisor._tidy_due(now_s)
    assert asked == [100.0, 130.0]


def test_a_line_says_the_process_and_the_replica_as_far_as_they_are_known() -> None:
    assert LineSource(3).fields == {"stage": 3}
    assert LineSource(3, "3/1", 42).fields == {"pid": 42, "stage": 3, "replica": "3/1"}


@pytest.mark.attack("Z46")
def test_a_line_that_looks_like_a_sample_of_another_stage_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    supervisor = _supervisor(_Launcher(), 1)
    (slot,) = supervisor._slots
    for stage_id, known in ((7, None), (0, 5)):
        supervisor._handle_line(slot, b'said\0omni sample {"type":"replica","stage_id":%d,"replica_id":5}' % stage_id)
        assert slot.replica_id == known
    supervisor._handle_line(slot, b'\0omni sample {"type":"replica","x":' + b"[" * 5000)
    assert capfd.readouterr().err.count("said") == 2
