"""What ``omni status`` makes of the members of etcd, and where it puts the flags."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from omni_discovery.commands.registry import add_registry_options, registry_flags
from omni_discovery.commands.status.command import _Answer, _judge_members
from omni_discovery.etcd.members import EtcdMember
from omni_discovery.kv import Listing

ANSWERS = EtcdMember("a:1", has_leader=True)
AWAY = EtcdMember("b:1", "nobody listens there")
ALONE = EtcdMember("a:1", has_leader=False)


@pytest.mark.parametrize(
    ("members", "answered", "said"),
    [
        ((ANSWERS,), True, ""),
        ((ANSWERS, AWAY), True, "member b:1 does not answer: nobody listens there"),
        ((AWAY,), False, "b:1 does not answer: nobody listens there"),
        ((ALONE, AWAY), False, "etcd has lost its quorum: a:1 can't find a leader"),
        ((ANSWERS,), False, "refused"),
    ],
)
def test_what_is_wrong_with_etcd_is_named(members: tuple[EtcdMember, ...], answered: bool, said: str) -> None:
    answer = _Answer(Listing(1, 1, ()) if answered else None, members, "" if answered else "refused")
    found = _judge_members(answer)
    assert [each.text for each in found] == ([said] if said else [])
    assert all(each.command[0] == "etcdctl" for each in found)


def test_the_flags_lead_to_the_same_registry_and_hold_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_ETCD_PASSWORD", "secret")
    parser = argparse.ArgumentParser()
    add_registry_options(parser)
    words = ["--etcd-endpoints", "a:1,b:1", "--namespace", "n", "--etcd-ca", "ca.pem", "--etcd-user", "u"]
    made = registry_flags(parser.parse_args([*words, "--etcd-password-file", "p"]))
    assert made == [
        *("--etcd-endpoints", "a:1,b:1", "--namespace", "n", "--etcd-ca", str(Path("ca.pem").absolute())),
        *("--etcd-password-file", str(Path("p").absolute()), "--etcd-user", "u"),
    ]
