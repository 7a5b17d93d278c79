"""Which keys open a door, and by which names; what stands in a file of keys."""

from __future__ import annotations

import pytest

from hub.api.door.keys import ApiKey, KeyRing, bearer_of, read_key, read_key_file
from omni_discovery.errors import ConfigError
from omni_discovery.records.api_key import digest_of


def name_of(ring: KeyRing, key: str) -> str | None:
    found = ring.find(key)
    return None if found is None else found.name


def test_each_key_opens_by_its_name_and_nothing_else_does() -> None:
    ring = KeyRing([ApiKey("alice", digest_of("a-key")), ApiKey("bob", digest_of("b-key"))])
    assert [name_of(ring, key) for key in ("a-key", "b-key")] == ["alice", "bob"]
    for wrong in ("", "a-ke", "a-key ", "A-KEY", "a-key\x00", digest_of("a-key").hex(), "\udcff", "ключ"):
        assert ring.find(wrong) is None, wrong
    assert not ring.awaits_etcd


def test_a_key_of_nothing_opens_nothing() -> None:
    assert KeyRing([ApiKey("empty", digest_of(""))]).find("") is None


def test_keys_of_etcd_open_once_known_and_until_they_are_taken_back() -> None:
    """None known is not none asked for: the door is closed meanwhile, and after the last was taken back."""
    ring = KeyRing([ApiKey("file", digest_of("f"))], from_etcd=True)
    assert (ring.awaits_etcd, name_of(ring, "f"), name_of(ring, "e")) == (True, "file", None)
    ring.replace({"alice": digest_of("e")})
    assert (ring.awaits_etcd, name_of(ring, "f"), name_of(ring, "e")) == (False, "file", "alice")
    ring.replace({})
    assert (ring.awaits_etcd, name_of(ring, "f"), name_of(ring, "e")) == (False, "file", None)


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


@pytest.mark.attack("M9")
def test_keys_without_names_in_two_files_are_not_called_alike() -> None:
    first, second = read_key_file("a-key\n", "one"), read_key_file("\nb-key\nbob:c-key\n", "two", 2)
    assert [key.name for key in (*first, *second)] == ["line-1", "file-2-line-2", "bob"]
