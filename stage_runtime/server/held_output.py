"""HeldOutput: what the engine says of one request while its hub is behind, joined into one message. Pure."""

from __future__ import annotations

from itertools import chain
from typing import Final

from stage_runtime.engine_loop.jobs import OutputChunk

#: Bounds of what is joined: a message has to be read at once.
_MOST_CHUNKS: Final = 1024
_MOST_CHARACTERS: Final = 32 << 10


class HeldOutput:
    """Chunks of text of one request, in order, that leave as one: a hub that is behind reads that in less time."""

    def __init__(self) -> None:
        self._chunks: list[OutputChunk] = []
        self._characters = 0

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def add(self, chunk: OutputChunk) -> bool:
        """Hold a chunk. Return False, and hold nothing more, if it can't be joined to what is held."""
        characters = self._characters + len(chunk.text)
        if not _is_plain(chunk) or characters > _MOST_CHARACTERS or len(self._chunks) >= _MOST_CHUNKS:
            return False
        if self._chunks and not _are_alike(self._chunks[0], chunk):
            return False
        self._chunks.append(chunk)
        self._characters = characters
        return True

    def take(self) -> OutputChunk | None:
        """All that is held, as one chunk; None if nothing is. Nothing is held then."""
        chunks, self._chunks, self._characters = self._chunks, [], 0
        if len(chunks) < 2:
            return chunks[0] if chunks else None
        first = chunks[0]
        return OutputChunk(
            first.key,
            first.modality,
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        )


def _is_plain(chunk: OutputChunk) -> bool:
    has_more = chunk.mime or chunk.logprobs or chunk.prompt_logprobs or chunk.prompt_token_ids
    return chunk.attachment is None and not has_more


def _are_alike(first: OutputChunk, chunk: OutputChunk) -> bool:
    # Text with the ids of some of its tokens would look as if another replica could go on behind it.
    return first.modality == chunk.modality and bool(first.token_ids) == bool(chunk.token_ids)
