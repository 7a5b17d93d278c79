"""What a replica fetches is from where it was announced; what is read of it is counted."""

from __future__ import annotations

import errno
from typing import Any

import msgspec
import pytest

from omni_discovery.deploy.document import DEFAULT_WINDOW
from omni_discovery.errors import ConfigError
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.known_producers import KnownProducers
from omni_discovery.wire import PayloadRef
from stage_runtime.config import PayloadError
from stage_runtime.connectors.base import current_producer
from stage_runtime.connectors.errors import TransferError, TransferTimeoutError
from stage_runtime.engine_loop.jobs import Work
from stage_runtime.engine_loop.payloads import Edge, Payloads, size_of
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


@pytest.mark.attack("Z80")
@pytest.mark.parametrize("said", [0, 1 << 40])
def test_what_was_read_is_counted_whatever_the_reference_says(said: int) -> None:
    """In shared memory nothing but the file says how large it is."""
    ref = PayloadRef(from_stage=0, to_stage=1, key="key", connector="c", size_bytes=said, metadata={})
    found = Payloads(1, {(0, 1): Edge("c", RecordingConnector())}, lambda: 0.0).fetch([ref], 0.1)
    assert (found[""], size_of(found)) == ({0: {"x": 1}}, 1)


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
    assert Late(4.5, 0.5, fails=TransferTimeoutError("late")).fault(105.0) == 0, "all the time that producers have"


@pytest.mark.parametrize(
    ("error", "left_s"),
    [
        (TransferTimeoutError("late"), 4.0),
        (MemoryError(), 900.0),
        (OSError(errno.EMFILE, "too many"), 900.0),
        # A pool of this side, which others' reads fill.
        (OSError(errno.ENOBUFS, "no room"), 900.0),
    ],
)
def test_no_producer_answers_for_a_short_deadline_or_what_is_missing_here(error: Exception, left_s: float) -> None:
    assert Late(1.0, 3.0, fails=error).fault(100.0 + left_s) is None


class Store(RecordingConnector):
    """Stores what it is given, until ``is_full``; says how it is."""

    def __init__(self, says: Any = None) -> None:
        super().__init__()
        self.says = {"status": "healthy"} if says is None else says
        self.stored: list[str] = []
        self.is_full = False
        self.last_error = "it is full"

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        if self.is_full:
            return False, 0, None
        self.stored.append(put_key)
        return True, 5, {"at": to_stage}

    def cleanup(self, request_id: str) -> None:
        self.stored = [each for each in self.stored if not each.startswith(request_id)]

    def endpoint(self) -> dict[str, Any]:
        return {"port": 7}

    def health(self) -> dict[str, Any]:
        if isinstance(self.says, Exception):
            raise self.says
        return dict(self.says)


def payloads_of(
    *pairs: tuple[int, int], says: Any = None, keep_s: float = 900.0
) -> tuple[Payloads, Store, list[float]]:
    """The payloads of stage 1, with one store at all these edges, and their clock."""
    store, clock = Store(says), [100.0]
    edges = {pair: Edge("c", store, window=3 + pair[1]) for pair in pairs}
    return Payloads(1, edges, lambda: clock[0], keep_s), store, clock


def job(owner: str = "hub/a", key: str = "k", **fields: Any) -> Work:
    return Work(key, owner, "a", 0, {}, {}, (), (2,), 0.0, 60.0, **fields)


def test_windows_are_those_of_the_edges_and_the_usual_where_a_next_stage_has_none() -> None:
    payloads, _, _ = payloads_of((0, 1), (1, 2))
    assert payloads.windows([2, 3]) == {2: 5, 3: DEFAULT_WINDOW}
    assert payloads.windows_from([0]) == {0: 4}
    with pytest.raises(PayloadError, match="no edge from stage 5 ends at this replica"):
        payloads.windows_from([0, 5])


def test_a_record_names_where_the_next_stages_fetch_and_no_edge_that_ends_here() -> None:
    payloads, _, _ = payloads_of((0, 1), (1, 2), (1, 3))
    where = {"connector": "c", "port": 7}
    assert payloads.endpoints() == {"1-2": where, "1-3": where}


@pytest.mark.parametrize(
    ("says", "trouble"),
    [
        ({"status": "healthy", "reason": "x"}, ""),
        ({"status": "unhealthy", "reason": "no disk"}, "stage 1 can't hand over to 2: no disk"),
        ({"status": "unhealthy"}, "stage 1 can't hand over to 2: c"),
        (RuntimeError("a bug"), ""),
    ],
)
def test_the_first_connector_that_is_unwell_is_the_trouble(says: Any, trouble: str) -> None:
    payloads, _, _ = payloads_of((1, 2), (1, 3), says=says)
    assert payloads.trouble() == trouble


def test_a_connector_that_can_not_become_well_is_an_error() -> None:
    payloads, _, _ = payloads_of((1, 2), says=ConfigError("no such folder"))
    with pytest.raises(ConfigError):
        payloads.trouble()


def test_a_hand_off_is_named_with_all_that_its_reader_needs() -> None:
    payloads, store, _ = payloads_of((1, 2))
    assert payloads.hand_over(job(), None, [2]) == ()
    (ref,) = payloads.hand_over(job(), {"x": 1, "kv_transfer_params": {"host": "h"}}, [2])
    assert (ref.from_stage, ref.to_stage, ref.connector, ref.size_bytes) == (1, 2, "c", 5)
    assert ref.metadata == {"at": "2", "kv_transfer_params": {"host": "h"}, "consume": False}
    assert store.stored == [ref.key]
    (second,) = payloads.hand_over(job(), {"x": 1}, [2], number=1)
    assert second.key == f"{ref.key}_1"
    assert len({payloads.hand_over(job(key=key), {}, [2])[0].key for key in ("a", "b")}) == 2
    kept = {payloads.hand_over(job(segment=each), {}, [2])[0].key for each in (None, 0, 1, 2)}
    assert len(kept) == 3, "the first segment is as good as none"


def test_what_can_not_be_stored_takes_all_of_its_request_with_it() -> None:
    payloads, store, _ = payloads_of((1, 2))
    payloads.hand_over(job("hub/b", "b"), {}, [2])
    payloads.hand_over(job(), {}, [2])
    store.is_full = True
    with pytest.raises(PayloadError, match="c could not store the hand-off for stage 2: it is full"):
        payloads.hand_over(job(), {}, [2])
    assert (len(store.stored), payloads.failures) == (1, 1)
    store.is_full = False
    with pytest.raises(PayloadError, match="no edge leads from stage 1 to 5"):
        payloads.hand_over(job("hub/b", "b"), {}, [2, 5])
    assert store.stored == []


def test_pieces_are_released_with_the_first_of_them_and_segments_before_another() -> None:
    payloads, store, _ = payloads_of((1, 2))
    for number in range(3):
        payloads.hand_over(job(), {}, [2], number)
    assert len(store.stored) == 3
    payloads.release("hub/a")
    assert store.stored == []
    for segment in range(3):
        payloads.hand_over(job(segment=segment), {}, [2])
    last = store.stored[1:]
    payloads.release_before("hub/a", 1)
    assert store.stored == last
    payloads.release_hub("hu")
    assert store.stored == last
    payloads.release_hub("hub")
    assert store.stored == []


def test_hand_offs_that_are_too_old_go_the_oldest_first() -> None:
    payloads, store, clock = payloads_of((1, 2), keep_s=10.0)
    for owner, now_s in (("hub/a", 100.0), ("hub/b", 105.0), ("hub/a", 106.0)):
        clock[0] = now_s
        payloads.hand_over(job(owner, f"{owner}{now_s}"), {}, [2])
    first, second, third = store.stored
    clock[0] = 109.9
    payloads.expire()
    assert store.stored == [first, second, third]
    clock[0] = 110.0
    payloads.expire()
    assert store.stored == [second, third]
    clock[0] = 116.0
    payloads.expire()
    assert store.stored == []


def test_only_what_travels_in_its_reference_is_at_hand() -> None:
    payloads, store, _ = payloads_of((0, 1))
    store.inline = True
    ref = PayloadRef(from_stage=0, to_stage=1, key="k", connector="c", size_bytes=1)
    assert payloads.is_at_hand([ref])
    assert not payloads.is_at_hand([ref, msgspec.structs.replace(ref, from_stage=5)])
    assert not payloads.is_at_hand([msgspec.structs.replace(ref, metadata={"kv_transfer_params": {}})])
    assert not payloads.is_at_hand([msgspec.structs.replace(ref, metadata={"source_host": "h", "source_port": 1})])
    store.inline = False
    assert not payloads.is_at_hand([ref])


def test_a_reference_is_read_by_the_connector_of_its_edge_and_no_other() -> None:
    payloads, store, _ = payloads_of((0, 1), (1, 2))
    ref = PayloadRef(from_stage=0, to_stage=1, key="k", connector="c", size_bytes=1)
    assert payloads.fetch_at_hand([ref]) == {"": {0: {"x": 1}}}
    for wrong, told in [
        ({"connector": "d"}, "the hand-off of stage 0 came by d, this replica has c"),
        ({"from_stage": 1, "to_stage": 2}, "no edge from stage 1 to 2 ends at this replica"),
        ({"from_stage": 7}, "no edge from stage 7 to 1 ends at this replica"),
    ]:
        error = payloads.fetch_at_hand([msgspec.structs.replace(ref, **wrong)])
        assert isinstance(error, PayloadError)
        assert str(error) == told
    store.holds = [1]
    error = payloads.fetch_at_hand([ref])
    assert isinstance(error, PayloadError)
    assert (str(error), error.from_stage, payloads.failures) == ("the hand-off of stage 0 is no mapping", 0, 0)
    payloads.cancel_fetch([ref, msgspec.structs.replace(ref, from_stage=7)])
    assert store.cancelled == ["k"]


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


@pytest.mark.attack("Z38")
def test_a_reference_leads_to_few_addresses() -> None:
    many = {f"{number}": {"source_host": "10.0.0.1", "source_port": 4000} for number in range(4)}
    assert fetch(many, known=producers()) == {**many, "timeout_s": 0.1}
    with pytest.raises(PayloadError, match="hand-off of stage 0 is said to be at too many addresses"):
        fetch({**many, "4": many["0"]}, known=producers())
