"""Where a stage may fetch the pictures, sound and videos of requests from, by its operator's allow-list. Pure.

The names are vLLM's: ``engine_args.allowed_media_domains``, a list of hosts, and ``allowed_local_media_path``, a folder
of the replica's own host. Without them nothing is fetched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from omni_discovery.errors import InvalidRequestError

#: The engine that fetches, in the replica of the pipeline's first stage.
_FETCHES: Final = "vllm-omni"
_SCHEMES: Final = ("http", "https", "file")
#: What a URL is made of by its standard: readers of URLs disagree about everything else, such as a backslash.
_URL: Final = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]{1,4096}")


@dataclass(frozen=True, slots=True)
class MediaLinks:
    """An allow-list: the hosts, in small letters, and the folder, empty if no file may be read."""

    domains: tuple[str, ...] = ()
    folder: str = ""

    def __bool__(self) -> bool:
        return bool(self.domains or self.folder)


@dataclass(frozen=True, slots=True)
class Link:
    """A link that may be followed: the URL of a file on another host, or the path of one on this."""

    url: str = ""
    path: str = ""


def links_of(engine: str, engine_args: Mapping[str, Any]) -> MediaLinks:
    """The allow-list of a stage, empty if its engine does not fetch. The engine checks the types of its arguments."""
    if engine != _FETCHES:
        return MediaLinks()
    domains, folder = engine_args.get("allowed_media_domains"), engine_args.get("allowed_local_media_path")
    return MediaLinks(tuple(str(each).lower() for each in domains or ()), str(folder or ""))


def link_in(value: Any) -> str | None:
    """The link in the value of an ``image_url``, ``audio_url`` or ``video_url`` part; None if it holds something else.

    It is ``{"url": "https://..."}`` or that URL.
    """
    url = value.get("url") if isinstance(value, Mapping) else value
    is_link = isinstance(url, str) and url[:8].lower().startswith(tuple(f"{scheme}:" for scheme in _SCHEMES))
    return url if is_link else None


def check_link(url: str, links: MediaLinks) -> Link:
    """What to fetch for a link. Raise InvalidRequestError, with what is allowed, for one that is not on the list."""
    if not _URL.fullmatch(url):
        raise InvalidRequestError("a link has at most 4096 of the characters that the standard of URLs allows")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise InvalidRequestError(f"the link can't be read: {error}") from error
    if parts.scheme == "file":
        if not links.folder:
            raise InvalidRequestError("files of the replica's host are not read here: give the file itself, in base64")
        if host or parts.query or parts.fragment:
            raise InvalidRequestError("a link to a file of the replica's host is file:///FOLDER/FILE")
        return Link(path=unquote(parts.path))
    if not links.domains:
        raise InvalidRequestError("nothing is fetched from other hosts here: give the file itself, in base64")
    if "@" in parts.netloc:
        raise InvalidRequestError("a link holds no user and no password")
    if host not in links.domains:
        raise InvalidRequestError(f"only files of {', '.join(links.domains)} are fetched here")
    return Link(url=url)
