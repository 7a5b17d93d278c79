"""How long the keys and values of a namespace may be: nothing longer is read, wherever it comes from. Pure."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Final

import msgspec

from omni_discovery.errors import RecordError
from omni_discovery.inputs.containers import MAX_EXTREMES, has_many_extremes
from omni_discovery.records.keys import JOBS_ROOT, ROOT

#: The longest value but that of the deploy document. A record with eight edges and 64 voices has 7 kB; none has more
#: than 80 kB, with 256 voices of 64 Chinese characters, the bounds of 64 parameters and the longest reason in Chinese.
MAX_VALUE_BYTES: Final = 96 << 10
#: The longest key: none of this project has more than 200 bytes.
MAX_KEY_BYTES: Final = 512
#: What stands in place of a longer key's rest: its length, and a digest that tells it from others with this begin.
_CUT: Final = "... of {} bytes, {}"
_WAS_CUT: Final = re.compile(r"(.*)\.\.\. of \d+ bytes, [0-9a-f]{16}", re.DOTALL)
#: Commas and opening brackets of one value: what is between them costs far more memory than its bytes.
MAX_PARTS: Final = 8192
#: The key of a deploy document below its namespace.
_DOCUMENT: Final = "pipeline"
#: Wall-clock seconds that a clock can show. The age of any other number may have hundreds of digits.
WallTime = Annotated[float, msgspec.Meta(ge=0.0, lt=1e11)]
_ADVICE: Final = "find who writes it, then delete it with etcdctl del"


#: A longer value is no job.
MOST_JOB_BYTES: Final = 8 << 10


def decode_key(raw: bytes) -> str:
    """A key as text. Bytes that are not UTF-8 are escaped: such a key is not one of this project, nor is a cut one."""
    kept = raw
    if len(raw) > MAX_KEY_BYTES:
        end = MAX_KEY_BYTES
        # Not within a letter.
        while end > MAX_KEY_BYTES - 4 and raw[end] & 0xC0 == 0x80:
            end -= 1
        kept = raw[:end]
    text = kept.decode("utf-8", errors="backslashreplace")
    return text if kept is raw else text + _CUT.format(len(raw), hashlib.sha256(raw).hexdigest()[:16])


def begin_of_cut(key: str) -> str:
    """The begin of a key that ``decode_key`` has cut, longer than any key of this project; empty for a whole key."""
    found = _WAS_CUT.fullmatch(key)
    # A whole key may look like a cut one.
    return found[1] if found is not None and len(found[1].encode()) > MAX_KEY_BYTES - 4 else ""


def cut_value(key: str, value: bytes) -> bytes:
    """The value as it is; one that is too long only so far that this shows, since whoever lists it must hold it."""
    most_bytes = MOST_JOB_BYTES if key.startswith(JOBS_ROOT) else MAX_VALUE_BYTES
    if len(value) <= most_bytes or not key.startswith((ROOT, JOBS_ROOT)):
        return value
    return value if key.startswith(ROOT) and _place(key) == _DOCUMENT else value[: most_bytes + 1]


def _place(key: str) -> str:
    """A key below its namespace."""
    return key[len(ROOT) :].partition("/")[2]


_WAITS: Final = "waits/"
#: What one list may take of memory for waits, which are for people and anybody may write, and for jobs.
_MOST_WAITS_BYTES: Final = 2 << 20
_MOST_JOBS_BYTES: Final = 96 << 20


class ListRoom:
    """How much one list may still hold of what anybody may write in any number, and nothing else bounds."""

    def __init__(self) -> None:
        self._waits_bytes, self._jobs_bytes = _MOST_WAITS_BYTES, _MOST_JOBS_BYTES

    def fit(self, key: str, value: bytes) -> bytes:
        """The value as it is; nothing of a wait or a job for which there is no room."""
        if key.startswith(JOBS_ROOT):
            self._jobs_bytes -= len(value)
            return value if self._jobs_bytes >= 0 else b""
        if key.startswith(ROOT) and _place(key).startswith(_WAITS):
            self._waits_bytes -= len(value)
            return value if self._waits_bytes >= 0 else b""
        return value


def count_parts(value: bytes) -> int:
    """How many parts a value has at most, by its commas and opening brackets."""
    return value.count(b",") + value.count(b"[") + value.count(b"{")


def check_value(key: str, value: bytes) -> None:
    """Raise RecordError for a value that is too long, or has too many parts or costly numbers, to be decoded."""
    if len(value) > MAX_VALUE_BYTES:
        raise RecordError(key, f"has more than {MAX_VALUE_BYTES} bytes, as no record has: {_ADVICE}")
    if count_parts(value) > MAX_PARTS:
        raise RecordError(key, f"has more than {MAX_PARTS} parts, as no record has: {_ADVICE}")
    if has_many_extremes(value):
        raise RecordError(key, f"has more than {MAX_EXTREMES} numbers such as 1e300, as no record has: {_ADVICE}")
