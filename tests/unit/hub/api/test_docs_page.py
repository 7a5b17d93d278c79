"""The page of the description: it runs and fetches nothing, and a hostile name stays text."""

from __future__ import annotations

import base64
import hashlib
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from hub.api import docs_page
from hub.api.docs_page import HEADERS, DocsPage
from hub.api.openapi import openapi

#: What makes a browser run or fetch something.
ACTIVE_TAGS = {"script", "img", "link", "iframe", "object", "embed", "form", "base", "svg", "audio", "video", "source"}
ACTIVE_ATTRIBUTES = {"src", "srcset", "style", "action", "data", "background"}


class Seen(HTMLParser):
    """The tags, attributes and links of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: set[str] = set()
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links |= {value or "" for name, value in attrs if name == "href"}
        self.ids += [value or "" for name, value in attrs if name == "id"]


def page_of(title: str = "speaker", host: str = "hub:8000") -> str:
    return DocsPage(openapi(title)).of("http", host)


def test_the_page_has_no_script_and_nothing_from_elsewhere() -> None:
    seen = Seen(page_of())
    assert not seen.tags & ACTIVE_TAGS
    assert not seen.attributes & ACTIVE_ATTRIBUTES
    assert {link for link in seen.links if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in seen.links if link.startswith("#")} == set(seen.ids)
    assert len(seen.ids) == len(set(seen.ids)) == sum(map(len, openapi("x")["paths"].values()))


def test_the_policy_allows_the_pages_own_style_alone() -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", page_of(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in HEADERS["Content-Security-Policy"].split(";"))
    assert rules.pop("style-src") == f"'sha256-{digest}'"
    assert set(rules) >= {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert set(rules.values()) == {"'none'"}


@pytest.mark.attack("A30")
def test_a_name_or_host_that_is_markup_stays_text() -> None:
    markup = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>"
    seen = Seen(page_of(title=markup, host=markup))
    assert not seen.tags & ACTIVE_TAGS
    assert "onerror" not in seen.attributes
    assert "curl http://localhost:8000/" in page_of(host=markup)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("seed", "integer (at least 0, below 4611686018427387904)"),
        ("stop", "string or array of string"),
        ("priority", "integer (at least -1000000, at most 1000000); default 0"),
        ("stream_options", "object with include_usage, continuous_usage_stats, include_obfuscation"),
        ("logit_bias", "object of number (at least -100, at most 100)"),
        ("stream_format", '"audio" or "sse"'),
    ],
)
def test_a_fields_kind_and_bounds_are_said_in_words(field: str, said: str) -> None:
    cells = [unescape(cell) for cell in re.findall(f"<td><code>{field}</code></td><td>(.*?)</td>", page_of())]
    assert said in cells


def test_fields_that_are_only_tolerated_are_listed_apart_and_needed_ones_come_first() -> None:
    page = page_of()
    chat: Any = re.search(r"POST /v1/chat/completions</code></h2>(.*?)<h2", page, re.DOTALL)
    assert "<code>tools</code> (null, [])" in chat[1].split("taken only with these values")[1]
    assert re.findall(r"<td><code>(.*?)</code>", chat[1])[0] == "messages"
    assert "messages needed" in chat[1]


@pytest.mark.attack("O3")
def test_a_page_is_made_once_and_no_request_makes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six connections that asked for it without end took the hub's loop for themselves."""
    hosts = {"hub:8000": "http://hub:8000", "[fe80::1]:9": "'http://[fe80::1]:9", "": "http://localhost:8000"}
    pages = DocsPage(openapi("speaker"))
    anew = {host: docs_page._page(openapi("speaker"), address.strip("'")) for host, address in hosts.items()}
    monkeypatch.setattr(docs_page, "_page", None)
    for host, address in hosts.items():
        page = pages.of("http", host)
        assert page == anew[host]
        assert f"<pre>curl {address}/v1/models" in unescape(page)
    assert pages.of("https", "hub:8000") == anew["hub:8000"].replace("http://hub", "https://hub")
