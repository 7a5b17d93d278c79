"""Which keys open a door, and by which names; what stands in a file of keys."""

from __future__ import annotations

import pytest

from hub.api.door.keys import ApiKey, KeyRing, bearer_of, read_key, read_key_file
from omni_discovery.errors import ConfigError
from omni_discovery.records.api_key import digest_of


def test_each_key_opens_by_its_name_and_nothing_else_does() -> None:
    ring = KeyRing([ApiKey("alice", digest_of("a-key")), ApiKey("bob", digest_of("b-key"))])
    assert [ring.name_of(key) for key in ("a-key", "b-key")] == ["alice", "bob"]
    for wrong in ("", "a-ke", "a-key ", "A-KEY", "a-key\x00", digest_of("a-key").hex(), "\udcff", "ключ"):
        assert ring.name_of(wrong) is None, wrong
    assert not ring.awaits_etcd


def test_a_key_of_nothing_opens_nothing() -> None:
    assert KeyRing([ApiKey("empty", digest_of(""))]).name_of("") is None


def test_keys_of_etcd_open_once_known_and_until_they_are_taken_back() -> None:
    """None known is not none asked for: the door is closed meanwhile, and after the last was taken back."""
    ring = KeyRing([ApiKey("file", digest_of("f"))], from_etcd=True)
    assert (ring.awaits_etcd, ring.name_of("f"), ring.name_of("e")) == (True, "file", None)
    ring.replace({"alice": digest_of("e")})
    assert (ring.awaits_etcd, ring.name_of("f"), ring.name_of("e")) == (False, "file", "alice")
    ring.replace({})
    assert (ring.awaits_etcd, ring.name_of("f"), ring.name_of("e")) == (False, "file", None)


def test_what_is_shown_of_a_ring_holds_no_key() -> None:
    assert repr(KeyRing([read_key("alice", "a-key", "x")])) == "KeyRing(['alice'], awaits_etcd=False)"


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([], ""),
        ([(b"authorization", b"Bearer abc")], "abc"),
        ([(b"Authorization", b"bearer  abc ")], "abc"),
        ([(b"authorization", b"Basic abc")], ""),
        ([(b"authorization", b"Bearer")], ""),
        ([(b"authorization", b"abc")], ""),
        ([(b"authorization", b"Bearer abc"), (b"authorization", b"Bearer abc")], ""),
        ([(b"x-api-key", b"abc")], ""),
        ([(b"authorization", b"Bearer \xff")], "\xff"),
    ],
)
def test_a_key_is_what_follows_bearer_in_the_one_header(headers: list[tuple[bytes, bytes]], key: str) -> None:
    assert bearer_of(headers) == key


def test_a_file_holds_a_key_on_each_line_with_or_without_a_name() -> None:
    text = "# ours\n\nalice:k1\n  k2  \nbob: k3\n"
    assert read_key_file(text, "f") == (
        ApiKey("alice", digest_of("k1")),
        ApiKey("line-4", digest_of("k2")),
        ApiKey("bob", digest_of("k3")),
    )


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "f holds no key, so nobody could use the API"),
        ("# all\n\n", "holds no key"),
        ("alice:", "f, line 1: a key is one or more printable ASCII"),
        ("k\na b", "f, line 2: a key is"),
        ("schlüssel", "f, line 1: a key is"),
        ("a b:key", "f, line 1: what stands before ':' is no name"),
    ],
)
def test_a_file_that_is_none_is_refused_by_its_line_and_never_shown(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_key_file(text, "f")
    assert wrong in str(caught.value)
    assert "schl" not in str(caught.value)
