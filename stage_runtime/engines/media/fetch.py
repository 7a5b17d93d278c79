"""Fetches the files that a request names by links, from where the operator's allow-list has them."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.media_links import Link, MediaLinks, check_link, link_in

#: The parts of messages that may name a file by a link.
_LINKED: Final = ("image_url", "audio_url", "video_url")
#: Of all files of a request.
MAX_FETCH_BYTES: Final = 64 << 20
MAX_FETCH_S: Final = 20.0
#: Redirections of one link; each must be on the list, too.
_MOST_HOPS: Final = 3
_BLOCK: Final = 1 << 16


def fetch_links(inputs: Mapping[str, Any], links: MediaLinks) -> Mapping[str, Any]:
    """The inputs with the files, as bytes, in place of the links in parts of ``messages``. Blocks, 20 s at most.

    Raise InvalidRequestError for a link that is not on the list or gives no file, or if all are too large or late.
    """
    messages = inputs.get("messages")
    if not links or not isinstance(messages, list):
        return inputs
    found = _Fetch(links)
    made = [found.message(message) for message in messages]
    return {**inputs, "messages": made} if found.has_any else inputs


class _Fetch:
    """The files of one request, and what is left of its bounds."""

    def __init__(self, links: MediaLinks) -> None:
        self._links = links
        self._left_bytes = MAX_FETCH_BYTES
        self._until_s = time.monotonic() + MAX_FETCH_S
        self.has_any = False

    def message(self, message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        return {**message, "content": [self._part(part) for part in content]} if isinstance(content, list) else message

    def _part(self, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        url = link_in(part.get(kind)) if kind in _LINKED else None
        if url is None:
            return part
        self.has_any = True
        try:
            return {"type": kind, kind: self._file(check_link(url, self._links))}
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{kind}: {error}") from error

    def _file(self, link: Link) -> bytes:
        if link.path:
            return self._read(link.path)
        try:
            return asyncio.run(self._get(link.url))
        except TimeoutError as error:
            raise InvalidRequestError(
                f"the files of a request have to be here within {MAX_FETCH_S:g} s; they were not"
            ) from error

    def _read(self, path: str) -> bytes:
        """A file of this host. Links in the file system are followed before the folder is compared."""
        try:
            folder, real = Path(self._links.folder).resolve(strict=True), Path(path).resolve(strict=True)
            if not real.is_relative_to(folder):
                raise InvalidRequestError("the file is not in the folder that is allowed")
            # Not blocked by a FIFO that nobody writes to.
            with os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise InvalidRequestError("it is no regular file")
                return self._counted(file.read(self._left_bytes + 1))
        except InvalidRequestError:
            raise
        except (OSError, ValueError) as error:
            raise InvalidRequestError("there is no such file, or it can't be read") from error

    async def _get(self, url: str) -> bytes:
        import httpx

        try:
            # The bound is of the whole, however slowly it drips. No proxy and no login of the environment.
            async with asyncio.timeout(self._until_s - time.monotonic()), httpx.AsyncClient(trust_env=False) as client:
                for _ in range(_MOST_HOPS + 1):
                    # A fresh client has no cookies; a compressed file would unpack to any size.
                    async with client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response:
                        if response.has_redirect_location:
                            target = str(response.url.join(response.headers["Location"]))
                            url = check_link(target, MediaLinks(self._links.domains)).url
                            continue
                        if response.status_code != 200:
                            raise InvalidRequestError(f"its host has answered {response.status_code}")
                        return b"".join([self._counted(block) async for block in response.aiter_raw(_BLOCK)])
        except InvalidRequestError:
            raise
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise InvalidRequestError(f"the link can't be fetched: {type(error).__name__}") from error
        raise InvalidRequestError(f"the link is redirected more than {_MOST_HOPS} times")

    def _counted(self, block: bytes) -> bytes:
        self._left_bytes -= len(block)
        if self._left_bytes < 0:
            raise InvalidRequestError(f"the files of a request have at most {MAX_FETCH_BYTES >> 20} MiB together")
        return block
