"""Which links an operator's allow-list lets through."""

from __future__ import annotations

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.media_links import Link, MediaLinks, check_link, link_in, links_of

LISTED = MediaLinks(domains=("media.example.org", "::1"), folder="/srv/media")


def test_the_list_is_that_of_a_first_stage_that_fetches() -> None:
    args = {"allowed_media_domains": ["Media.Example.org"], "allowed_local_media_path": "/srv/media"}

    assert links_of("vllm-omni", args) == MediaLinks(("media.example.org",), "/srv/media")
    assert not links_of("vllm-omni", {})
    assert not links_of("vllm", args)


def test_links_are_told_from_files() -> None:
    for url in ("http://x/y", "HTTPS://x/y", "file:///x"):
        assert link_in({"url": url}) == link_in(url) == url
    for other in ("data:image/png;base64,AAAA", "httpx://x", "", None, 7, {"url": 7}, {}, "ftp://x/y"):
        assert link_in(other) is None


@pytest.mark.parametrize(
    ("url", "made"),
    [
        ("https://media.example.org/a.png?x=1#y", Link(url="https://media.example.org/a.png?x=1#y")),
        ("http://MEDIA.example.org:8080/a", Link(url="http://MEDIA.example.org:8080/a")),
        ("http://[::1]/a", Link(url="http://[::1]/a")),
        ("file:///srv/media/a%20b.png", Link(path="/srv/media/a b.png")),
    ],
)
def test_what_is_on_the_list_is_let_through(url: str, made: Link) -> None:
    assert check_link(url, LISTED) == made


@pytest.mark.attack("C12")
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.org/a.png", "only files of media.example.org"),
        ("https://media.example.org.evil.net/a", "only files of"),
        ("https://evil.net#media.example.org", "only files of"),
        ("https://media.example.org@evil.net/a", "no user"),
        ("https://evil.net\\@media.example.org/a", "the standard of URLs"),
        ("https://media.example.org\n.evil.net/a", "the standard of URLs"),
        ("https://media.example.org /a", "the standard of URLs"),
        ("https://x/" + "a" * 5000, "at most 4096"),
        ("https://[::1", "can't be read"),
        ("https://media.example.org:99999/", "can't be read"),
        ("https:///a", "only files of"),
        ("file://host/srv/media/a", "file:///FOLDER/FILE"),
        ("file:///srv/media/a?x", "file:///FOLDER/FILE"),
    ],
)
def test_what_is_not_on_the_list_is_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        check_link(url, LISTED)


def test_each_way_is_closed_by_itself() -> None:
    with pytest.raises(InvalidRequestError, match="nothing is fetched from other hosts"):
        check_link("http://media.example.org/a", MediaLinks(folder="/srv"))
    with pytest.raises(InvalidRequestError, match="files of the replica's host are not read"):
        check_link("file:///srv/a", MediaLinks(domains=("media.example.org",)))
