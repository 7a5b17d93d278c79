"""What a hub writes into its beat, and what readers make of one."""

from __future__ import annotations

import msgspec
import pytest

from omni_discovery.errors import RecordError, RegistryUnavailableError
from omni_discovery.kv import KeyValue
from omni_discovery.records import keys
from omni_discovery.records.beat import Beat, BeatReader, BeatRecord, decode_beat
from omni_discovery.records.health import HubHealth
from omni_discovery.testing import FakeKV, ManualClock

KEY = keys.beat_key("n", "hub-1")


async def test_a_beat_says_what_the_hub_goes_by_at_that_moment() -> None:
    kv, serves = FakeKV(ManualClock()), ["first", "second"]
    lease = await kv.grant(10.0)
    beat = Beat(kv, KEY, lambda: lease.lease_id, lambda: serves.pop(0))
    await beat.write(1, 7, 5.0)
    written = await kv.get(KEY)
    assert written is not None
    assert written.value == b'{"schema":1,"counter":1,"revision":7,"written_at":5.0,"pipeline":"first"}'
    assert beat.is_echo(written.value)
    assert not beat.is_echo(b"{}")
    await beat.write(2, 8, 6.0)
    written = await kv.get(KEY)
    assert written is not None
    assert decode_beat(KEY, written.value) == BeatRecord(counter=2, revision=8, written_at=6.0, pipeline="second")


async def test_a_beat_holds_the_report_of_that_moment() -> None:
    kv, reports = FakeKV(ManualClock()), [None, HubHealth(requests=1), HubHealth(requests=2)]
    lease = await kv.grant(10.0)
    beat = Beat(kv, KEY, lambda: lease.lease_id, health=lambda: reports.pop(0))
    read = []
    for counter in range(3):
        await beat.write(counter, 7, 5.0)
        written = await kv.get(KEY)
        assert written is not None
        assert beat.is_echo(written.value)
        read.append(decode_beat(KEY, written.value).health)
    assert read == [msgspec.UNSET, HubHealth(requests=1), HubHealth(requests=2)]


def test_a_beat_of_a_release_that_does_not_say_what_it_serves_is_read_as_ever() -> None:
    assert decode_beat(KEY, b'{"schema":1,"counter":1,"revision":7,"written_at":5.0}').pipeline == ""
    with pytest.raises(RecordError):
        decode_beat(KEY, b'{"pipeline":"' + b"x" * 65 + b'"}')


async def test_without_a_lease_nothing_is_written() -> None:
    kv = FakeKV(ManualClock())
    with pytest.raises(RegistryUnavailableError, match="no lease"):
        await Beat(kv, KEY, lambda: 0).write(1, 7, 5.0)
    assert await kv.get(KEY) is None


@pytest.mark.attack("V3")
def test_a_beat_that_was_not_written_again_is_not_decoded_again() -> None:
    """1. two hubs have beaten
    2. one of them beats again, the other has left: the former's new beat counts, and the latter's no more
    """
    old, other = (
        KeyValue(keys.beat_key("n", "a"), b'{"counter":1}', 1, 1),
        KeyValue(keys.beat_key("n", "b"), b"{}", 1, 1),
    )
    reader = BeatReader("n")
    first = reader.read([old, other], {"a", "b"})
    again = reader.read([old, other], {"a", "b"})
    assert first.keys() == again.keys() == {"a", "b"}
    assert again["a"] is first["a"]
    new = KeyValue(old.key, b'{"counter":2}', 1, 2)
    assert {hub: beat.counter for hub, beat in reader.read([new], {"a"}).items()} == {"a": 2}
