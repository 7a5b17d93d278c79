"""The connector over Yuanrong's transfer engine, without the NPUs that this needs.

The library's engine is the real one: it starts, takes pools, has its port, ends. Only its reading is done here, by a
copy within this process. With that the connector keeps the whole contract but for what takes two processes.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_discovery.errors import ConfigError
from stage_runtime.connectors import ConnectorSpec, OmniConnectorBase, OmniConnectorFactory, TransferError
from stage_runtime.connectors.store.registered import ManagedBuffer
from stage_runtime.connectors.yuanrong import transfer
from stage_runtime.connectors.yuanrong import transfer as engine
from tests.contract import test_connectors as suite
from tests.support.yuanrong import require_yuanrong

NAME = "YuanrongTransferEngineConnector"
SETTINGS: dict[str, Any] = {"shm_threshold_bytes": 0, "memory_pool_device": "cpu", "memory_pool_size": 32 << 20}


def _is_of_the_contract(name: str, value: object) -> bool:
    if not (name.startswith("test_") and inspect.isfunction(value)):
        return False
    wants = inspect.signature(value).parameters
    return "make" in wants and "peer" not in wants


globals().update({name: value for name, value in vars(suite).items() if _is_of_the_contract(name, value)})


class LocalReads:
    """The library's engine, but for reading, which reaches what engines of this process have registered."""

    registered: dict[str, list[tuple[int, int]]] = {}  # noqa: RUF012 - all engines of this process

    def __init__(self, real: Any) -> None:
        self._real = real
        self._where = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def initialize(self, where: str, protocol: str, device_name: str) -> Any:
        self._where = where
        return self._real.initialize(where, protocol, device_name)

    def register_memory(self, address: int, length: int) -> Any:
        self.registered.setdefault(self._where, []).append((address, length))
        return self._real.register_memory(address, length)

    def finalize(self) -> Any:
        self.registered.pop(self._where)
        return self._real.finalize()

    def transfer_sync_read(self, where: str, here: int, there: int, length: int) -> Any:
        pools = self.registered.get(where, [])
        reaches = any(start <= there and there + length <= start + size for start, size in pools)
        if reaches:
            ctypes.memmove(here, there, length)
        return SimpleNamespace(is_error=lambda: not reaches, get_msg=lambda: f"{where} has no such memory")


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one."""
    require_yuanrong()
    real = engine.load_library()
    local = SimpleNamespace(TransferEngine=lambda: LocalReads(real.TransferEngine()))
    monkeypatch.setattr(transfer, "check_npu", lambda: None)
    monkeypatch.setattr(engine, "load_library", lambda: local)


@pytest.fixture
def make(npu: None) -> Iterator[suite.Make]:
    made: list[OmniConnectorBase] = []

    def build(**extra: Any) -> OmniConnectorBase:
        made.append(OmniConnectorFactory.create_connector(ConnectorSpec(NAME, SETTINGS | extra)))
        return made[-1]

    yield build
    for connector in made:
        connector.close()
    assert LocalReads.registered == {}


def test_tensors_go_as_they_are_and_come_as_buffers(make: suite.Make) -> None:
    producer, consumer = make(), make()
    sent = torch.arange(1000, dtype=torch.int16)
    _, size_bytes, metadata = producer.put("0", "1", "key", sent)
    assert size_bytes == 2000
    got = consumer.get("0", "1", "key", metadata)
    assert got is not None
    assert isinstance(got[0], ManagedBuffer)
    with got[0] as buffer:
        assert torch.equal(buffer.as_tensor(torch.int16, (1000,)), sent)


def test_a_sender_can_be_asked_by_key(make: suite.Make) -> None:
    producer, consumer = make(sender_token="secret"), make(sender_token="secret")
    assert isinstance(producer, transfer.YuanrongTransferEngineConnector)
    assert isinstance(consumer, transfer.YuanrongTransferEngineConnector)
    assert producer.put("0", "1", "key", {"a": 1})[0]
    info = producer.get_connection_info()
    consumer.update_sender_info(info["host"], info["zmq_port"])
    assert consumer.get("0", "1", "key") == ({"a": 1}, producer.put("0", "1", "key", {"a": 1})[1])


@pytest.mark.parametrize("missing", ["source_host", "generation", "token"])
def test_metadata_that_does_not_say_enough_finds_nothing(make: suite.Make, missing: str) -> None:
    producer, consumer = make(), make()
    _, _, metadata = producer.put("0", "1", "key", {"a": 1})
    assert metadata is not None
    del metadata[missing]
    assert consumer.get("0", "1", "key", metadata) is None


def test_a_port_of_its_own_is_taken(make: suite.Make) -> None:
    port = engine._free_port("127.0.0.1")
    connector = make(rpc_port=port)
    assert isinstance(connector, transfer.YuanrongTransferEngineConnector)
    assert connector.endpoint()["session"] == f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"protocol": "tcp"}, "protocol is 'tcp'; Yuanrong's engine has 'ascend' only"),
        ({"device_name": "cuda:0"}, "device_name is 'cuda:0'"),
        ({"advertise_host": "::1"}, "IPv4 addresses only, and '::1' is none"),
        ({"host": "somewhere"}, "'somewhere' is none"),
        ({"rpc_port": 70000}, "rpc_port is 70000"),
        ({"role": "neither"}, "role is 'neither'"),
        ({"memory_pool_size": 1}, "memory_pool_size is 1"),
        ({"pool": 1}, "'pool' is not known"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_settings_are_told_before_the_hardware_is_looked_for(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        OmniConnectorFactory.create_connector(ConnectorSpec(NAME, wrong))


def test_without_an_npu_it_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    require_yuanrong()
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ConfigError, match=r"torch_npu.*Where there is no NPU, take YuanrongConnector"):
        OmniConnectorFactory.create_connector(ConnectorSpec(NAME))


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("yr.datasystem", "datasystem"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'omni-discovery\[yuanrong\]'"):
        OmniConnectorFactory.create_connector(ConnectorSpec(NAME))


def test_what_the_library_refuses_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reading, on a machine without an NPU: the hand-off stays where it is, and the consumer is told."""
    require_yuanrong()
    monkeypatch.setattr(transfer, "check_npu", lambda: None)
    with (
        OmniConnectorFactory.create_connector(ConnectorSpec(NAME, SETTINGS)) as producer,
        OmniConnectorFactory.create_connector(ConnectorSpec(NAME, SETTINGS)) as consumer,
    ):
        stored, _, metadata = producer.put("0", "1", "key", {"a": 1})
        assert stored
        with pytest.raises(TransferError, match="could not read"):
            consumer.get("0", "1", "key", metadata)
        assert producer.health()["pending"] == 1
