"""The replicas of a view, beside a plain dict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.replica_map import ReplicaId, ReplicaMap, replica_id

IDS = st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 127, 128, 129, 255, 256, 5000]))


def info(key: ReplicaId, queue_length: int = 0) -> ReplicaInfo:
    return ReplicaInfo("tcp://h:1", "tcp://h:2", key[0], ReplicaStatus.UP, queue_length, 0.0, 0.0, key[1])


@given(st.lists(st.tuples(st.lists(IDS, max_size=4), st.lists(IDS, max_size=4)), max_size=12))
def test_it_is_what_a_dict_would_be_and_the_ones_before_stay_as_they_were(
    changes: list[tuple[list[ReplicaId], list[ReplicaId]]],
) -> None:
    expected: dict[ReplicaId, ReplicaInfo] = {}
    made, before = ReplicaMap(), list[tuple[ReplicaMap, dict[ReplicaId, ReplicaInfo]]]()
    for number, (removed, put) in enumerate(changes):
        before.append((made, expected.copy()))
        gone = [expected.pop(key) for key in dict.fromkeys(removed) if key in expected]
        new = [info(key, number) for key in put]
        expected.update((replica_id(each), each) for each in new)
        made = made.changed(gone, new)
        assert made == expected
        assert len(made) == len(expected)
        assert sorted(made) == sorted(expected)
        assert sorted(each.queue_length for each in made.values()) == sorted(
            each.queue_length for each in expected.values()
        )
        assert dict(made.items()) == expected
        assert all(
            made.get(key) is expected.get(key) and (key in made) == (key in expected) for key in [*removed, *put]
        )
        assert made._groups.keys() == {(key[0], key[1] >> 7) for key in expected}
    assert all(earlier == then for earlier, then in before)


def test_a_change_of_one_among_ten_thousand_shares_all_groups_but_its_own() -> None:
    first = ReplicaMap().changed((), [info((0, number)) for number in range(10_000)])
    second = first.changed((), [info((0, 300), 7)])
    other = [place for place in first._groups if first._groups[place] is not second._groups[place]]
    assert other == [(0, 300 >> 7)]
    assert (first[0, 300].queue_length, second[0, 300].queue_length) == (0, 7)
    assert max(len(first._groups), *map(len, first._groups.values())) <= 128
