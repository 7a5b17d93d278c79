"""Who a hub is after a restart."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from hub.serve.identity import HubIdentity, acquire_identity, new_identity
from tests.support.other_user import NOBODY, require_root


def take(folder: Path, endpoints: str = "e:1", host: str = "host") -> HubIdentity:
    return acquire_identity(folder, "default", endpoints, host)


def test_a_hub_that_is_restarted_is_the_same_one(tmp_path: Path) -> None:
    first = take(tmp_path)
    first.close()
    second = take(tmp_path)
    assert (second.hub_id, second.keys, second.view) == (first.hub_id, first.keys, first.view)
    second.close()
    second.close()


def test_two_hubs_at_a_time_are_two(tmp_path: Path) -> None:
    first, second = take(tmp_path), take(tmp_path)
    assert first.hub_id != second.hub_id
    assert first.keys != second.keys
    assert first.view != second.view
    first.close()
    third = take(tmp_path)
    assert third.hub_id == first.hub_id
    for identity in (second, third):
        identity.close()


def test_another_registry_or_host_is_another_hub(tmp_path: Path) -> None:
    identities = [take(tmp_path), take(tmp_path, endpoints="e:2"), take(tmp_path, host="b")]
    for identity in identities:
        identity.close()
    assert len({identity.hub_id for identity in identities}) == 3


def test_the_secret_is_for_its_owner_only(tmp_path: Path) -> None:
    identity = take(tmp_path)
    identity.close()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert identity.keys.secret not in repr(identity)


@pytest.mark.parametrize(
    "content",
    ["", "{}", '{"hub_id": "h", "curve_secret": "short"}', '{"hub_id": "../x", "curve_secret": "SECRET"}', "\x00\xff"],
)
def test_a_damaged_identity_is_made_anew_with_a_warning(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = take(tmp_path)
    first.close()
    assert first.view is not None
    first.view.with_name("identity.json").write_text(content.replace("SECRET", first.keys.secret))
    with caplog.at_level(logging.WARNING):
        second = take(tmp_path)
    second.close()
    assert second.hub_id != first.hub_id
    assert "hub.identity_ignored" in caplog.text
    third = take(tmp_path)
    third.close()
    assert third.hub_id == second.hub_id


def test_a_folder_that_can_not_be_used_makes_a_hub_of_one_life(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plain").write_text("")
    identity = take(tmp_path / "plain")
    assert identity.view is None
    assert identity.hub_id.startswith("host-")
    assert "hub.state_unusable" in caplog.text


@pytest.mark.attack("Z18")
@pytest.mark.parametrize("place", ["state", "namespace", "own"])
@pytest.mark.parametrize("by", ["mode", "owner"])
def test_an_identity_that_another_user_could_have_left_is_not_taken(
    tmp_path: Path, place: str, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As with HOME=/tmp, where another user may have made the folders first, with a key of their own in them."""
    first = take(tmp_path / "state")
    first.close()
    assert first.view is not None
    own = first.view.parent
    others = {"state": tmp_path / "state", "namespace": own.parent, "own": own}[place]
    if by == "owner":
        require_root()
        os.chown(others, NOBODY, -1)
    else:
        others.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        second = take(tmp_path / "state")
    assert second.keys != first.keys
    assert (second.view, second.lock_fd) == (None, -1)
    assert "hub.state_unusable" in caplog.text
    assert str(others) in caplog.text
    assert "set XDG_STATE_HOME to a folder of this user's own" in caplog.text


@pytest.mark.parametrize("host", ["", "...", "gpu 7/ü", "x" * 100])
def test_any_host_name_makes_an_id_that_can_stand_in_a_key(host: str) -> None:
    from omni_discovery.records import keys

    hub_id = new_identity(host).hub_id
    assert keys.parse_key("default", keys.hub_key("default", hub_id)) == keys.HubKey(hub_id)
