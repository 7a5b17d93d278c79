"""Which families of keys each role of etcd users may read and write."""

from __future__ import annotations

from typing import get_args

import pytest

from omni_discovery.records import jobs, keys
from omni_discovery.records.roles import (
    API_KEYS,
    OPEN_FAMILIES,
    WRITES,
    access_of,
    access_of_all,
    roles_that_write,
)

ROLES = tuple(WRITES)


def may(role: str, key: str, *, write: bool) -> bool:
    for access in access_of("team-a", role):
        covers = key.startswith(access.key) if access.is_prefix else key == access.key
        if covers and (access.writes or not write):
            return True
    return False


#: Every kind of key, with the roles that may write it.
WRITERS = {
    keys.replica_key("team-a", 0, 1): {"operator", "replica"},
    keys.hub_key("team-a", "h"): {"hub"},
    keys.beat_key("team-a", "h"): {"hub"},
    keys.replica_control_key("team-a", 0, 1): {"operator"},
    keys.hub_control_key("team-a", "h"): {"operator"},
    keys.pipeline_key("team-a"): {"hub", "operator"},
    keys.wait_key("team-a", "w"): {"hub", "replica"},
    keys.api_key_key("team-a", "laptop"): {"operator"},
    jobs.job_key("team-a", "video_0"): {"hub"},
    jobs.sweep_key("team-a"): {"hub"},
    jobs.job_key("team-b", "video_0"): set(),
    keys.replica_key("team-ab", 0, 1): set(),
    keys.pipeline_key("team-a") + "-too": set(),
}


def test_every_kind_of_key_has_its_writers() -> None:
    """A kind that is added is nobody's until somebody decides whose it is: this test says so."""
    assert {type(keys.parse_key("team-a", key)) for key in WRITERS} - {type(None)} == set(get_args(keys.RegistryKey))


@pytest.mark.attack("A3")
@pytest.mark.parametrize("key", WRITERS)
def test_each_key_has_its_writers_and_no_others(key: str) -> None:
    assert {role for role in ROLES if may(role, key, write=True)} == WRITERS[key]


@pytest.mark.attack("A3")
def test_all_read_what_is_open_and_only_hubs_and_operators_the_api_keys() -> None:
    for role in ROLES:
        for key in list(WRITERS)[:7]:
            assert may(role, key, write=False)
        assert may(role, "/omni/v1/team-a/keys/laptop", write=False) is (role in ("hub", "operator"))
        assert not may(role, keys.pipeline_key("team-b"), write=False)


@pytest.mark.attack("A3")
def test_only_hubs_see_jobs_and_whoever_has_the_whole_namespace() -> None:
    key = jobs.progress_key("team-a", "video_0")
    assert {role for role in ROLES if may(role, key, write=False)} == {"hub"}
    assert {(each.key, each.writes) for each in access_of_all("team-a")} == {
        ("/omni/v1/team-a/", True),
        ("/omni/v1-jobs/team-a/", True),
    }


def test_roles_are_told_by_what_may_be_written() -> None:
    assert roles_that_write([*OPEN_FAMILIES, API_KEYS]) == ("hub", "replica", "operator")
    assert roles_that_write(["replicas/", "waits/", "control/"]) == ("replica",)
    assert roles_that_write([]) == ()


@pytest.mark.parametrize("role", [role for role in ROLES if WRITES[role]])
def test_a_role_is_whole_for_a_user_who_may_write_just_what_it_writes(role: str) -> None:
    assert role in roles_that_write(WRITES[role])
    assert role not in roles_that_write(WRITES[role][1:])
