"""BoundedTokenizer: a tokenizer that reads no more of a client's text than could fit into the model's context.

To encode a text takes a second for each megabyte or so, and the engine's thread does nothing else meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError

#: Characters for each token of the context up to which a text is encoded whole: texts that fit have about so many.
_USUAL_CHARACTERS: Final = 4
#: Characters of a piece that is encoded to see how many tokens a longer text will have.
_PIECE: Final = 1 << 14
#: From so many characters on, a text's tokens are kept for the next request, which may be another answer to it.
_WORTH_KEEPING: Final = 1 << 12
#: Messages from which on what is made of a chat is kept, too.
_MANY: Final = 64


class BoundedTokenizer:
    """Encodes what a model of ``longest`` tokens can take. Several threads may use it, as they may the tokenizer.

    A text of more characters than so many of the model's longest tokens have is refused before it is read, as vLLM's
    own server does; of others, the first tokens that are too many end it.
    """

    def __init__(self, tokenizer: Any, longest: int) -> None:
        self._tokenizer, self._longest = tokenizer, longest
        #: Characters of the model's longest token; 0: no long text has come yet.
        self._token_characters = 0
        # The next two are swapped whole, so that another thread finds all of them.
        #: The last long chat and the options with which it was rendered, and the text that it became.
        self._last_chat: tuple[Any, Any] = (None, None)
        #: The last long text, whether it was the begin of a prompt, and its tokens, or why it was refused.
        self._last: tuple[str, bool, Sequence[int] | str] = ("", False, ())

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """The tokenizer's own. A long chat that comes again next, as for another answer to it, is rendered once."""
        if len(messages) < _MANY:
            return self._tokenizer.apply_chat_template(messages, **options)
        last, rendered = self._last_chat
        if last != (messages, options):
            rendered = self._tokenizer.apply_chat_template(messages, **options)
            self._last_chat = (messages, options), rendered
        return rendered

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text. Raise InvalidRequestError for one that is far too long; others may be too long yet."""
        if len(text) < _WORTH_KEEPING:
            return self._encode(text, add_special_tokens)
        last_text, had_special, found = self._last
        if had_special is not add_special_tokens or last_text != text:
            found = self._refusal(text) or self._encode(text, add_special_tokens)
            self._last = (text, add_special_tokens, found)
        if isinstance(found, str):
            raise InvalidRequestError(found)
        return list(found)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def check_characters(self, count: int) -> None:
        """Raise InvalidRequestError for a text of more characters than the context can have, before it is there."""
        if refusal := self._refusal_of(count):
            raise InvalidRequestError(refusal)

    def _refusal_of(self, characters: int) -> str:
        if characters <= _USUAL_CHARACTERS * self._longest:
            return ""
        if not self._token_characters:
            self._token_characters = max(map(len, self._tokenizer.get_vocab()))
        if characters <= self._longest * self._token_characters:
            return ""
        return (
            f"this model's maximum context length is {self._longest} tokens, of at most {self._token_characters} "
            f"characters each; the prompt has {characters} characters. Make it shorter"
        )

    def _refusal(self, text: str) -> str:
        """Why a text is not encoded; empty if it is. Works through no more than a few times the context."""
        if len(text) <= _USUAL_CHARACTERS * self._longest:
            return ""
        told = f"this model's maximum context length is {self._longest} tokens"
        if refusal := self._refusal_of(len(text)):
            return refusal
        # Each cut may make tokens of its own, so only twice the context is surely too much.
        tokens = 0
        for at in range(0, len(text), _PIECE):
            tokens += len(self._encode(text[at : at + _PIECE], add_special_tokens=False))
            if tokens > 2 * self._longest:
                return f"{told}; the first {at + _PIECE} characters of the prompt are more. Make it shorter"
        return ""
