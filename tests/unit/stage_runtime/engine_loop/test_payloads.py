"""What a replica fetches is what was announced to it, and nothing more."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.known_producers import KnownProducers
from omni_discovery.wire import PayloadRef
from stage_runtime.config import PayloadError
from stage_runtime.connectors.base import current_producer
from stage_runtime.connectors.errors import TransferError, TransferTimeoutError
from stage_runtime.engine_loop.payloads import Edge, Payloads
from tests.support.recording_connector import RecordingConnector


def producers() -> KnownProducers:
    """One producer is registered, at 10.0.0.1 port 4000."""
    where = {"0-1": {"connector": "c", "host": "10.0.0.1", "port": 4000}}
    known = KnownProducers([(0, 1)])
    known.apply_records([ReplicaInfo("tcp://10.0.0.1:1", "", 0, ReplicaStatus.UP, 0, 0.0, 0.0, connectors=where)])
    return known


def fetch(metadata: dict[str, Any], size_bytes: int = 1000, *, holds: Any = None, known: Any = None) -> dict[str, Any]:
    """What the connector is asked for."""
    connector = RecordingConnector(holds)
    ref = PayloadRef(from_stage=0, to_stage=1, key="key", connector="c", size_bytes=size_bytes, metadata=metadata)
    Payloads(1, {(0, 1): Edge("c", connector)}, lambda: 0.0, producers=known).fetch([ref], 0.1)
    (asked,) = connector.asked
    return asked


@pytest.mark.attack("A19")
def test_a_hand_off_may_not_be_larger_than_its_reference_says() -> None:
    assert fetch({"data_size": 1000})["data_size"] == 1000
    with pytest.raises(PayloadError, match="1001 bytes was announced as one of 1000"):
        fetch({"data_size": 1001})


@pytest.mark.attack("A19")
def test_metadata_hide_no_others_under_the_key() -> None:
    """A connector would take those below the key in place of those that were checked."""
    hidden = {"source_host": "169.254.169.254", "source_port": 80, "data_size": 1 << 40}
    assert fetch({"data_size": 10, "key": hidden}) == {"data_size": 10, "timeout_s": 0.1}


@pytest.mark.attack("A19")
@pytest.mark.parametrize(
    "metadata",
    [
        {"source_host": "169.254.169.254", "source_port": 4000},
        {"source_host": "10.0.0.1", "source_port": 22},
        {"source_port": 4000},
        {"0/1/key": {"source_host": "169.254.169.254", "source_port": 80}},
        {"source_host": ["10.0.0.1"], "source_port": 4000},
    ],
)
def test_only_a_registered_producer_is_fetched_from(metadata: dict[str, Any]) -> None:
    here = {"source_host": "10.0.0.1", "source_port": 4000}
    assert fetch(here, known=producers()) == {**here, "timeout_s": 0.1}
    with pytest.raises(PayloadError, match="where no registered replica of that stage hands over"):
        fetch(metadata, known=producers())


@pytest.mark.attack("A19")
@pytest.mark.parametrize(
    "params", [{"remote_host": "169.254.169.254"}, {"remote_bootstrap_addr": "http://169.254.169.254:80"}]
)
def test_a_kv_cache_is_fetched_from_a_registered_producer_only(params: dict[str, Any]) -> None:
    fetch({}, holds={"kv_transfer_params": {"remote_host": "10.0.0.1"}}, known=producers())
    with pytest.raises(PayloadError, match="which is no registered replica of that stage"):
        fetch({}, holds={"kv_transfer_params": params}, known=producers())


class Late:
    """Two producers of stage 2; what is fetched from each takes so many seconds of a clock."""

    def __init__(self, *takes_s: float, fails: Exception | None = None) -> None:
        self.now_s, self.takes_s = 100.0, list(takes_s)
        self.connector = RecordingConnector(on_get=self._pass)
        self.fails = fails
        edges = {(stage, 2): Edge("c", self.connector) for stage in (0, 1)}
        self.payloads = Payloads(2, edges, lambda: self.now_s)

    def _pass(self) -> None:
        self.now_s += self.takes_s.pop(0)
        if self.fails is not None and not self.takes_s:
            raise self.fails

    def fault(self, deadline_s: float) -> int | None:
        """Fetch both; the stage that is at fault."""
        with pytest.raises(PayloadError) as raised:
            self.payloads.fetch([of_stage(0), of_stage(1)], deadline_s)
        return raised.value.from_stage


def of_stage(stage: int, role: str = "") -> PayloadRef:
    return PayloadRef(from_stage=stage, to_stage=2, key="k", connector="c", size_bytes=1, role=role)


@pytest.mark.attack("K1")
def test_all_hand_offs_of_a_request_have_one_time_together() -> None:
    late = Late(4.0, 4.0, 4.0)
    late.payloads.fetch([of_stage(0), of_stage(1), of_stage(0, "negative")], 1000.0)
    assert [asked["timeout_s"] for asked in late.connector.asked] == [5.0, 1.0, 0.0]
    late = Late(1.0, 1.0)
    late.payloads.fetch([of_stage(0), of_stage(1)], 103.0)
    assert [asked["timeout_s"] for asked in late.connector.asked] == [3.0, 2.0]


@pytest.mark.attack("K1")
def test_one_hand_off_of_each_stage_and_role_is_fetched() -> None:
    late = Late(0.0, 0.0, 0.0)
    with pytest.raises(PayloadError, match="two hand-offs of stage 0"):
        late.payloads.fetch([of_stage(0), of_stage(0)], 1000.0)
    assert len(late.connector.asked) == 1


@pytest.mark.attack("K1")
def test_of_what_came_too_late_the_slowest_is_at_fault() -> None:
    """The last one has to fail although it is the first that took the time."""
    assert Late(4.5, 0.5, fails=TransferTimeoutError("late")).fault(1000.0) == 0
    assert Late(0.5, 4.5, fails=TransferTimeoutError("late")).fault(1000.0) == 1
    assert Late(4.5, 0.1, fails=TransferError("reset")).fault(1000.0) == 1


@pytest.mark.parametrize(
    ("error", "left_s"),
    [(TransferTimeoutError("late"), 4.0), (MemoryError(), 900.0), (OSError(errno.EMFILE, "too many"), 900.0)],
)
def test_no_producer_answers_for_a_short_deadline_or_what_is_missing_here(error: Exception, left_s: float) -> None:
    assert Late(1.0, 3.0, fails=error).fault(100.0 + left_s) is None


@pytest.mark.attack("Q61")
def test_a_connector_is_asked_in_the_name_of_the_producer() -> None:
    """A connector that looks names up gives each producer its share of look-ups."""
    asked: list[str] = []

    connector = RecordingConnector(on_get=lambda: asked.append(current_producer()))
    metadata = {"source_host": "10.0.0.1", "source_port": 4000}
    ref = PayloadRef(from_stage=0, to_stage=1, key="key", connector="c", size_bytes=1000, metadata=metadata)
    for known in (producers(), None):
        Payloads(1, {(0, 1): Edge("c", connector)}, lambda: 0.0, producers=known).fetch([ref], 0.1)
    assert asked == ["0/-1", ""]
    assert current_producer() == ""
