"""What a replica fetches is what was announced to it, and nothing more."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.known_producers import KnownProducers
from omni_discovery.wire import PayloadRef
from stage_runtime.config import PayloadError
from stage_runtime.connectors.base import OmniConnectorBase
from stage_runtime.engine_loop.payloads import Edge, Payloads


class Recording(OmniConnectorBase):
    """Fetches nothing, and keeps what it was asked for."""

    def __init__(self, holds: Any = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.holds = holds or {"x": 1}

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        raise NotImplementedError

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        self.asked.append(metadata or {})
        return self.holds, 1

    def cleanup(self, request_id: str) -> None:
        raise NotImplementedError

    def health(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def producers() -> KnownProducers:
    """One producer is registered, at 10.0.0.1 port 4000."""
    where = {"0-1": {"connector": "c", "host": "10.0.0.1", "port": 4000}}
    known = KnownProducers([(0, 1)])
    known.apply_records([ReplicaInfo("tcp://10.0.0.1:1", "", 0, ReplicaStatus.UP, 0, 0.0, 0.0, connectors=where)])
    return known


def fetch(metadata: dict[str, Any], size_bytes: int = 1000, *, holds: Any = None, known: Any = None) -> dict[str, Any]:
    """What the connector is asked for."""
    connector = Recording(holds)
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
