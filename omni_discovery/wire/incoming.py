"""Incoming: a message of several frames as it comes, put together frame by frame if it was cut. Pure."""

from __future__ import annotations

from collections import deque

from omni_discovery.errors import WireError
from omni_discovery.wire.frames import lengths_of, most_pieces
from omni_discovery.wire.messages import MAX_ATTACHMENTS


class Incoming:
    """The message whose first frame is ``first``. A gigabyte may follow: nothing here takes longer than 64 MiB do."""

    def __init__(self, first: bytes) -> None:
        self._first = first
        try:
            lengths = lengths_of(first)
        except WireError:
            lengths = None
        self._is_cut = lengths is not None
        #: Of the frames that are still to come, or to end.
        self._lengths = deque(lengths or ())
        self._frames = [] if self._is_cut else [first]
        #: Of the frame that has begun.
        self._pieces: list[bytes] = []
        self._is_wrong = False

    def add(self, frame: bytes) -> bool:
        """Take what came next; return whether more may come. What comes for all that is to be dropped."""
        if not self._is_cut:
            self._frames.append(frame)
            return len(self._frames) <= 1 + MAX_ATTACHMENTS
        self._end_empty()
        self._pieces.append(frame)
        if not self._lengths:
            self._is_wrong = True
        elif len(self._pieces) == most_pieces([self._lengths[0]]):
            whole = frame if len(self._pieces) == 1 else b"".join(self._pieces)
            self._is_wrong |= len(whole) != self._lengths.popleft()
            self._frames.append(whole)
            self._pieces = []
        return not self._is_wrong

    def frames(self) -> list[bytes]:
        """The whole message; of one with too many frames, one more than it may have.

        Of one whose pieces are not as it says, only the first frame.
        """
        self._end_empty()
        return [self._first] if self._is_wrong or self._lengths else self._frames

    def _end_empty(self) -> None:
        """A frame of no bytes has no piece."""
        while self._lengths and not self._lengths[0]:
            self._frames.append(b"")
            self._lengths.popleft()
