"""How the connector of Yuanrong's datasystem treats a package and a datasystem that fail."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.errors import EdgeFullError, TransferCancelledError, TransferError
from stage_runtime.connectors.yuanrong.client import PAUSE_S, YuanrongClient, load_package
from stage_runtime.connectors.yuanrong.store import YuanrongConnector, whole_seconds

UNREACHABLE = "code: [RPC unavailable], msg: [[RPC_RECV_TIMEOUT] has not responded\nLine of code : 1520]"
NO_ROOM = "code: [Out of memory], msg: [Shared memory no space in arena: 17]"
REFUSED = "code: [Invalid parameter], msg: [The key contains illegal char(s)]"
NAMES = ("yr.datasystem.kv_client", "datasystem.kv_client")


class HandClock:
    """Stands still unless it is set."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeKV:
    """Answers each call with the error that is set, and counts calls."""

    def __init__(self, **_: Any) -> None:
        self.error = ""
        self.calls = 0

    def init(self) -> None:
        """It connects."""

    def exist(self, names: list[str]) -> list[bool]:
        return self._answer([True] * len(names))

    def delete(self, names: list[str]) -> list[str]:
        return self._answer([])

    def mcreate(self, names: list[str], sizes: list[int], mode: object, ttl_s: int) -> list[Any]:
        memory = [bytearray(size) for size in sizes]
        return self._answer([SimpleNamespace(MutableData=lambda one=one: one) for one in memory])

    def mset_buffer(self, buffers: list[Any]) -> None:
        self.stored = [bytes(buffer.MutableData()) for buffer in buffers]

    def _answer(self, good: Any) -> Any:
        self.calls += 1
        if self.error:
            raise RuntimeError(self.error)
        return good


@pytest.fixture
def fake() -> FakeKV:
    return FakeKV()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def client(fake: FakeKV, clock: HandClock) -> YuanrongClient:
    package = SimpleNamespace(KVClient=lambda **_: fake, SetParam=lambda: SimpleNamespace(write_mode=0))
    return YuanrongClient(package, "127.0.0.1", 1, 1.0, clock)


def test_the_parts_of_a_value_are_stored_one_behind_the_other(client: YuanrongClient, fake: FakeKV) -> None:
    client.store([("a", [b"12", b"", memoryview(b"345")]), ("b", [b"6"])], 10)
    assert fake.stored == [b"12345", b"6"]


def test_after_a_call_without_an_answer_the_next_ones_fail_at_once_for_a_moment(
    client: YuanrongClient, fake: FakeKV, clock: HandClock
) -> None:
    """Each of them would hold the whole process for as long as it waits."""
    fake.error = UNREACHABLE
    with pytest.raises(TransferError, match=r"127\.0\.0\.1:1.*is it running"):
        client.exist(["a"])
    fake.error = ""
    with pytest.raises(TransferError, match=r"asked again in 2\.0 s"):
        client.exist(["a"])
    assert fake.calls == 1
    clock.now_s += PAUSE_S
    assert client.exist(["a"]) == [True]


def test_a_full_datasystem_is_not_asked_for_room_again_until_something_went(
    client: YuanrongClient, fake: FakeKV, clock: HandClock
) -> None:
    fake.error = NO_ROOM
    with pytest.raises(EdgeFullError, match="shared_memory_size_mb"):
        client.store([("a", [b"1"])], 10)
    fake.error = ""
    with pytest.raises(EdgeFullError, match="had no room a moment ago"):
        client.store([("a", [b"1"])], 10)
    assert (client.exist(["a"]), fake.calls) == ([True], 2)
    client.delete(["b"])
    client.store([("a", [b"1"])], 10)


def test_a_refusal_is_told_and_stops_nothing_else(client: YuanrongClient, fake: FakeKV) -> None:
    fake.error = REFUSED
    with pytest.raises(TransferError, match="illegal char"):
        client.exist(["ü"])
    fake.error = ""
    assert client.exist(["a"]) == [True]


def test_after_close_nothing_is_asked(client: YuanrongClient, fake: FakeKV) -> None:
    client.close()
    with pytest.raises(TransferCancelledError):
        client.exist(["a"])
    assert fake.calls == 0


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'omni-discovery\[yuanrong\]'"):
        YuanrongConnector({})


def test_the_package_is_also_found_by_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType(NAMES[1])
    monkeypatch.setitem(sys.modules, NAMES[0], None)
    monkeypatch.setitem(sys.modules, "datasystem", ModuleType("datasystem"))
    monkeypatch.setitem(sys.modules, NAMES[1], old)
    assert load_package() is old


@pytest.mark.parametrize(
    "wrong",
    [{"host": ""}, {"host": 1}, {"port": 0}, {"port": "35001"}, {"port": True}, {"request_timeout_s": 0}, {"hosts": 1}],
    ids=str,
)
def test_wrong_settings_are_refused_before_anything_is_looked_for(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        YuanrongConnector(wrong)


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, "127.0.0.1"),
        ({"advertise_host": "10.0.0.1"}, "10.0.0.1"),
        ({"host": "h", "advertise_host": "10.0.0.1"}, "h"),
    ],
)
def test_the_datasystem_is_looked_for_on_the_replicas_own_host(
    settings: dict[str, Any], host: str, fake: FakeKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    package = SimpleNamespace(KVClient=lambda **arguments: asked.append(arguments) or fake, SetParam=SimpleNamespace)
    monkeypatch.setitem(sys.modules, NAMES[0], package)
    with YuanrongConnector(settings) as connector:
        assert connector.health()["status"] == "healthy"
    assert (asked[0]["host"], asked[0]["port"]) == (host, 35001)


@pytest.mark.parametrize(("ttl_s", "seconds"), [(0, 1), (0.05, 1), (1.2, 2), (3600.0, 3600), (float("inf"), 2**31 - 1)])
def test_a_time_to_live_is_never_the_zero_that_means_for_ever(ttl_s: float, seconds: int) -> None:
    assert whole_seconds(ttl_s) == seconds
