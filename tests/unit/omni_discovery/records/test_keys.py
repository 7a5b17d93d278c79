"""Keys are built and read back; a neighbour's key is never ours."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_discovery.errors import ConfigError
from omni_discovery.records import keys

_names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
_numbers = st.integers(0, 999_999_999)


def test_the_key_of_another_namespace_is_none_of_ours() -> None:
    assert keys.parse_key("n", keys.replica_key("m", 0, 1)) is None
    assert keys.parse_key("n", keys.replica_key("nn", 0, 1)) is None


@settings(deadline=None)
@given(_names, _numbers, _numbers, _names)
def test_what_is_built_is_read_back(namespace: str, stage_id: int, replica_id: int, hub_id: str) -> None:
    built = {
        keys.replica_key(namespace, stage_id, replica_id): keys.ReplicaKey(stage_id, replica_id),
        keys.replica_control_key(namespace, stage_id, replica_id): keys.ReplicaControlKey(stage_id, replica_id),
        keys.hub_key(namespace, hub_id): keys.HubKey(hub_id),
        keys.beat_key(namespace, hub_id): keys.BeatKey(hub_id),
        keys.hub_control_key(namespace, hub_id): keys.HubControlKey(hub_id),
        keys.pipeline_key(namespace): keys.PipelineKey(),
    }
    for key, meaning in built.items():
        assert keys.parse_key(namespace, key) == meaning
        assert keys.parse_key(namespace + "x", key) is None


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_other_text_is_no_key_and_no_error(rest: str) -> None:
    meaning = keys.parse_key("default", keys.namespace_prefix("default") + rest)
    assert meaning is None or "/" in rest or rest == "pipeline"


@pytest.mark.parametrize(
    "rest",
    ["", "replicas/", "replicas/0", "replicas/0/", "replicas/01/0", "replicas/-1/0", "replicas/0/1/2",
     "replicas/٣/0", "replicas/0/9999999999", "hubs/", "hubs/a/b", "pipeline/", "control/hubs", "control/0/x"],
)  # fmt: skip
def test_what_looks_like_a_key_but_is_none_is_none(rest: str) -> None:
    assert keys.parse_key("default", keys.namespace_prefix("default") + rest) is None


def test_a_prefix_ends_so_that_no_longer_name_begins_with_it() -> None:
    assert not keys.replica_key("ab", 0, 0).startswith(keys.namespace_prefix("a"))
    assert not keys.replica_key("a", 12, 0).startswith(keys.replicas_prefix("a", 1))


@pytest.mark.parametrize("namespace", ["", "a/b", ".a", "-a", "a" * 64, "ü", "a b", "a\n"])
def test_a_namespace_that_can_not_stand_in_a_key_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigError):
        keys.check_namespace(namespace)
