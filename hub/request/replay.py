"""What the client has had of a deterministic stage, compared with what its next attempt makes. Pure.

The same is dropped and the rest is shown, whatever the chunks are in which tokens and text come this time. A difference
ends the request: the client would hear or read two answers, cut together.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import UNSET

from omni_discovery import wire

_SOUND: Final = "audio/wav"
#: Of a sound one sample in so many is kept, and of long ones fewer, at most so many: another utterance differs in
#: nearly all of them.
_KEPT_EACH: Final = 16
_MOST_SAMPLES: Final = 8192
#: By how many steps of 16 bits a sample may differ: a decoder that works on several streams at once rounds otherwise.
_MOST_STEPS: Final = 1
#: Of a larger file only some blocks are hashed, spread over all of it: it is done in the hub's only loop.
_WHOLE_BYTES: Final = 4 << 20
#: The memory of a mark without its samples.
_MARK_BYTES: Final = 256
_BLOCK_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Mark:
    """What is kept of an attachment that was shown: of a sound some of its samples, of any other file its hash.

    Little of large files: they are compared in the hub's only loop.
    """

    size_bytes: int
    samples: array[int]
    digest: bytes

    @property
    def memory_bytes(self) -> int:
        """The estimated memory that it takes."""
        return _MARK_BYTES + 2 * len(self.samples)

    def is_of(self, mime: str, file: bytes) -> bool:
        """Whether a file is the same; a sound, as far as one can hear."""
        other = mark_of(mime, file)
        if (self.size_bytes, self.digest) != (other.size_bytes, other.digest):
            return False
        if self.samples == other.samples:
            return True
        pairs = zip(self.samples, other.samples, strict=True)
        return all(-_MOST_STEPS <= mine - theirs <= _MOST_STEPS for mine, theirs in pairs)


def mark_of(mime: str, file: bytes) -> Mark:
    """What is to be kept of an attachment."""
    if mime != _SOUND:
        return Mark(len(file), array("h"), _digest_of(memoryview(file)))
    # The header stands among the samples: it is the same for sounds of one length.
    samples = memoryview(file)[: len(file) // 2 * 2].cast("h")
    step = max(_KEPT_EACH, -(-len(samples) // _MOST_SAMPLES))
    return Mark(len(file), array("h", samples[::step]), b"")


def _digest_of(file: memoryview) -> bytes:
    count = _WHOLE_BYTES // _BLOCK_BYTES
    if len(file) <= _WHOLE_BYTES:
        return hashlib.blake2b(file, digest_size=16).digest()
    found = hashlib.blake2b(digest_size=16)
    for number in range(count):
        start = number * (len(file) - _BLOCK_BYTES) // (count - 1)
        found.update(file[start : start + _BLOCK_BYTES])
    return found.digest()


@dataclass(frozen=True, slots=True)
class Rest:
    """The part of a chunk that the client has not had. ``difference``: how the part that it had differs, if it does."""

    message: wire.Chunk
    attachments: Sequence[bytes]
    is_empty: bool = False
    difference: str = ""


class Replay:
    """One attempt of a stage, of which the client has had so many chunks with these tokens, text and attachments."""

    def __init__(self, chunks: int, token_ids: tuple[int, ...], text: str, marks: tuple[Mark, ...]) -> None:
        self._chunks = chunks
        self._token_ids = token_ids
        self._text = text
        self._marks = marks
        #: How much of each has come again.
        self._tokens_at = self._text_at = self._marks_at = 0

    @property
    def shortage(self) -> str:
        """What has not come again, for the error of an attempt that has ended; empty if all has."""
        all_came = (len(self._token_ids), len(self._text), len(self._marks))
        if (self._tokens_at, self._text_at, self._marks_at) == all_came:
            return ""
        return "it ended before all came again that had been shown"

    def rest_of(self, message: wire.Chunk, attachments: Sequence[bytes]) -> Rest:
        """Compare the attempt's next chunk with what was shown, and return the rest of it."""
        tokens = self._token_ids[self._tokens_at : self._tokens_at + len(message.token_ids)]
        text = self._text[self._text_at : self._text_at + len(message.text)]
        marks = self._marks[self._marks_at : self._marks_at + len(attachments)]
        if difference := self._difference(message, attachments, tokens, text, marks):
            return Rest(message, attachments, difference=difference)
        self._tokens_at += len(tokens)
        self._text_at += len(text)
        self._marks_at += len(marks)
        rest = _without(message, len(tokens), len(text), is_known=message.seq < self._chunks)
        left = attachments[len(marks) :]
        has_content = bool(message.token_ids or message.text or attachments)
        is_empty = not (rest.token_ids or rest.text or left) and (has_content or message.seq < self._chunks)
        return Rest(rest, left, is_empty)

    def _difference(
        self,
        message: wire.Chunk,
        attachments: Sequence[bytes],
        tokens: tuple[int, ...],
        text: str,
        marks: tuple[Mark, ...],
    ) -> str:
        if message.token_ids[: len(tokens)] != tokens:
            pairs = zip(message.token_ids, tokens, strict=False)
            place = self._tokens_at + next(number for number, (mine, theirs) in enumerate(pairs) if mine != theirs)
            return f"token {place} is another than the one that had been shown"
        if not message.text.startswith(text):
            return f"the text is another than had been shown, behind character {self._text_at}"
        for number, (mark, file) in enumerate(zip(marks, attachments, strict=False), self._marks_at):
            if not mark.is_of(message.mime, file):
                return f"piece {number} is another than the one that had been shown"
        return ""


def _without(message: wire.Chunk, tokens: int, characters: int, *, is_known: bool) -> wire.Chunk:
    """A chunk without its first tokens and characters; ``is_known``: the client had a chunk of that number."""
    if not (tokens or characters or is_known):
        return message
    return msgspec.structs.replace(
        message,
        token_ids=message.token_ids[tokens:],
        text=message.text[characters:],
        logprobs=message.logprobs if message.logprobs is UNSET else message.logprobs[tokens:],
        prompt_logprobs=UNSET if is_known else message.prompt_logprobs,
        prompt_token_ids=UNSET if is_known else message.prompt_token_ids,
    )
