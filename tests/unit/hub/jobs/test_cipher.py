"""The encryption of a job's files: what was written is read, and whatever was changed is refused."""

from __future__ import annotations

import io

import pytest

from hub.jobs.cipher import JobKeys, content_bytes, job_key_of, read_job_keys, seal, unseal
from hub.jobs.errors import JobFileError
from omni_discovery.errors import ConfigError

KEY, OTHER = job_key_of(b"\1" * 32), job_key_of(b"\2" * 32)
SALT = b"s" * 16
MIB = 1 << 20


def sealed(content: bytes, place: str = "a/b") -> bytes:
    return b"".join(seal(KEY, place, SALT, content))


def unsealed(file: bytes, place: str = "a/b", key=KEY) -> bytes:  # type: ignore[no-untyped-def]
    return b"".join(unseal(key, place, len(file), io.BytesIO(file).read))


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 5])
def test_what_was_written_is_read_and_its_length_is_known(size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    file = sealed(content[:size])
    assert content_bytes(len(file)) == size
    assert unsealed(file) == content[:size]


@pytest.mark.attack("H21")
def test_nothing_of_the_content_is_in_the_file_and_the_same_twice_is_not_the_same() -> None:
    secret = b"a cat in the rain " * 50
    file = sealed(secret)
    assert not any(secret[at : at + 8] in file for at in range(len(secret) - 8))
    assert b"".join(seal(KEY, "a/b", b"t" * 16, secret))[20:] != file[20:]


@pytest.mark.attack("H21")
@pytest.mark.parametrize("at", [0, 3, 4, 19, 20, 50, MIB, MIB + 40, -1])
def test_a_changed_bit_is_found(at: int) -> None:
    file = bytearray(sealed(b"x" * (MIB + 100)))
    file[at] ^= 1
    with pytest.raises(JobFileError):
        unsealed(bytes(file))


@pytest.mark.attack("H21")
@pytest.mark.parametrize("length", [0, 4, 19, 20, 35, 40, 20 + MIB, 20 + MIB + 16, 20 + MIB + 30])
def test_a_file_that_was_cut_is_refused_also_between_two_segments(length: int) -> None:
    with pytest.raises(JobFileError):
        unsealed(sealed(b"x" * (MIB + 100))[:length])


@pytest.mark.attack("H21")
def test_segments_that_were_swapped_or_left_out_are_refused() -> None:
    segment, file = MIB + 16, sealed(b"a" * MIB + b"b" * MIB + b"c")
    head, one, two, last = file[:20], file[20 : 20 + segment], file[20 + segment : 20 + 2 * segment], file[-17:]
    assert unsealed(head + one + two + last) == b"a" * MIB + b"b" * MIB + b"c"
    for body in (two + one + last, one + last, one + two, one + one + last):
        with pytest.raises(JobFileError):
            unsealed(head + body)


@pytest.mark.attack("H21")
def test_a_file_in_anothers_place_or_with_another_key_is_refused() -> None:
    file = sealed(b"mine")
    for place, key in (("a/c", KEY), ("b/b", KEY), ("a/b", OTHER)):
        with pytest.raises(JobFileError):
            unsealed(file, place, key)


def test_keys_are_read_from_lines_and_named_after_themselves() -> None:
    keys = read_job_keys(f"# ours\n{'ab' * 32}\n\n{'CD' * 32}  # the older one\n", "file")
    assert keys.first == job_key_of(b"\xab" * 32)
    older = job_key_of(b"\xcd" * 32)
    assert keys.of(older.name) == older
    assert (keys.has(older.name), keys.has(KEY.name)) == (True, False)
    with pytest.raises(JobFileError, match="which this hub does not have: --job-key-file"):
        keys.of(KEY.name)


def test_a_key_never_shows_itself() -> None:
    assert "ab" * 8 not in repr(JobKeys((job_key_of(b"\xab" * 32),)).first)
    assert b"\xab" * 32 not in repr(job_key_of(b"\xab" * 32)).encode()


@pytest.mark.parametrize("text", ["", "# none\n", "ab" * 31, "xy" * 32, "key:" + "ab" * 32, f"{'ab' * 32}\n" * 2])
def test_a_file_that_holds_no_keys_is_refused_and_not_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_job_keys(text, "--job-key-file f")
    assert "--job-key-file f" in str(refused.value)
    assert "abab" not in str(refused.value)
