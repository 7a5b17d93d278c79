"""One answer of the echo engine: the text that has come, the words that were put out, the part that was handed over."""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import numpy as np

from omni_discovery.data_urls import FILE_PARTS, read_file
from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import MAX_TOOL_CALLS, ToolAnswer, ToolCall
from stage_runtime.config import NotResumableError
from stage_runtime.engines.base import StageRequest

_CALL = re.compile(r"CALL (\w{1,64}) (\{[^{}]*\})")
_WORD = re.compile(r"\s*+\S++(?:\s*+$|\s)")

#: How many words an answer may have ready before it wants no more pieces.
_AHEAD: Final = 2

#: See Engine.not_resumable.
NOT_RESUMABLE: Final[Mapping[str, str]] = {
    "other words": "what was shown are not the first words of this answer, as where the prompts differ",
    "a picture": "it is drawn in one piece, there is nothing behind it",
}


@dataclass(slots=True)
class Speech:
    """Grows while pieces of earlier stages come in; a word is put out once its end has come."""

    request: StageRequest
    max_tokens: int | None
    next_at_s: float
    #: All text that has come, and its number of words, whatever ``max_tokens`` is.
    text: str = ""
    word_count: int = 0
    #: Words that are still to be put out.
    words: deque[str] = field(default_factory=deque)
    #: Token ids of the words that were put out.
    said: list[int] = field(default_factory=list)
    #: Stages that have pieces left to send.
    owed: set[int] = field(default_factory=set)
    #: The next stages or the client are behind.
    is_paused: bool = False
    #: How many characters of the text were handed over.
    handed: int = 0
    #: What draws the numbers behind the words, if there are any.
    dice: Random | None = None
    _shown: str = ""

    def add_text(self, text: str) -> None:
        """Append text. Raise NotResumableError if the answer does not begin with what another replica has shown."""
        if self.dice is not None:
            dice = self.dice
            text = re.sub(r"\S+", lambda word: f"{word[0]}~{dice.randrange(1000)}", text)
        # In text without a word, the search would begin anew at each character.
        words = [] if text.isspace() else _WORD.findall(text)
        self.text += text
        self.word_count += len(words)
        planned = len(self.said) + len(self.words)
        self.words += words if self.max_tokens is None else words[: max(0, self.max_tokens - planned)]
        self._skip_shown()

    def stage_ended(self, from_stage: int) -> None:
        """A stage has sent its last piece. Raise NotResumableError if less came than another replica has shown."""
        self.owed.discard(from_stage)
        self._skip_shown()

    @property
    def wants_more(self) -> bool:
        """Whether it has few words left to put out."""
        return len(self.words) < _AHEAD

    @property
    def is_whole(self) -> bool:
        """Whether it ends with the words that it has."""
        return not self.owed or (self.max_tokens is not None and len(self.said) + len(self.words) >= self.max_tokens)

    def next_piece(self, word: str, *, is_last: bool) -> str:
        """The text that goes to the next stages with this word: all that they do not have yet, up to its end."""
        start = self.handed
        behind = sum(map(len, self.words))
        self.handed = len(self.text) if is_last else max(start + len(word), len(self.text) - behind)
        return self.text[start : self.handed]

    def _skip_shown(self) -> None:
        resume = self.request.resume
        if resume is None:
            return
        while self.words and len(self.said) < len(resume.token_ids):
            word = self.words.popleft()
            self._shown += word
            self.said.append(token_id(word))
        is_short = len(self.said) < len(resume.token_ids)
        mine, theirs = self.said[: len(resume.token_ids)], list(resume.token_ids)
        same = resume.text.startswith(self._shown) if is_short else resume.text == self._shown
        if not same or mine != theirs[: len(mine)] or (is_short and not self.owed):
            raise NotResumableError(f"other words: {NOT_RESUMABLE['other words']}")


def called_in(text: str) -> ToolAnswer | None:
    """The calls of functions in a text, and what is beside them; None if there are none."""
    calls = tuple(ToolCall(name=found[1], arguments=found[2]) for found in _CALL.finditer(text))[:MAX_TOOL_CALLS]
    return ToolAnswer(calls=calls, content=_CALL.sub("", text).strip()) if calls else None


def token_id(word: str) -> int:
    """The token id of a word, below 50000; the same in every process."""
    return zlib.crc32(word.encode("utf-8")) % 50_000


def handoff_of(text: str, filler_bytes: int) -> dict[str, Any]:
    """The hand-off of a text: ``token_ids``, int64 of shape [bytes], its UTF-8 bytes; ``filler``, zero bytes."""
    encoded = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)
    return {"token_ids": encoded, "filler": np.zeros(filler_bytes, dtype=np.uint8)}


def text_handed(payload: Mapping[str, Any]) -> str:
    """The text of a hand-off. Raise InvalidRequestError if an echo engine has not made it."""
    try:
        return bytes(np.asarray(payload["token_ids"], dtype=np.int64).astype(np.uint8)).decode("utf-8")
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"the hand-off is not an echo engine's: {error}") from error


def text_of(request: StageRequest) -> str:
    """The text that a request begins with; empty if its pieces are yet to come. Raise InvalidRequestError."""
    payload = request.payload
    if payload is not None:
        return text_handed(payload)
    if request.stream_from:
        return ""
    inputs = request.inputs
    text = inputs.get("prompt")
    if text is None and isinstance(inputs.get("messages"), list) and inputs["messages"]:
        last = inputs["messages"][-1]
        text = _content_of(last.get("content") if isinstance(last, Mapping) else None)
    if text is None and isinstance(inputs.get("prompt_token_ids"), list):
        text = " ".join(str(number) for number in inputs["prompt_token_ids"])
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequestError("the prompt is empty")
    return text


def companions_of(request: StageRequest) -> str:
    """The texts of the request's companions, each behind its role."""
    if not request.companions:
        return ""
    heard = {role: handed for role, by_stage in request.companions.items() for handed in by_stage.values()}
    return "".join(f" {role}: {text_handed(handed)}" for role, handed in heard.items())


def _content_of(content: Any) -> Any:
    if isinstance(content, list):
        return " ".join(_said_of(part) for part in content if isinstance(part, Mapping))
    return content


def _said_of(part: Mapping[str, Any]) -> str:
    """The text of a part of a message; of a picture or another file, one word with its size and checksum."""
    if part.get("type") not in FILE_PARTS:
        return str(part.get("text", ""))
    mime, file = read_file(part)
    return f"<{mime};bytes={len(file)};crc32={zlib.crc32(file):08x}>"
