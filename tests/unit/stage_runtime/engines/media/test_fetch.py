"""Links in messages are followed as far as the operator's allow-list goes, within bounds of size and time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.media_links import MediaLinks
from stage_runtime.engines.media import fetch
from stage_runtime.engines.media.fetch import fetch_links
from tests.support.media_host import media_host

HERE = MediaLinks(domains=("127.0.0.1",))


@pytest.fixture
def host() -> Iterator[str]:
    with media_host({"x.png": b"a file"}) as address:
        yield address


def shown(url: str, kind: str = "image_url") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]}


def file_of(inputs: Any) -> Any:
    part = inputs["messages"][0]["content"][0]
    return part[part["type"]]


def test_a_file_of_an_allowed_host_takes_the_place_of_its_link(host: str) -> None:
    for kind in ("image_url", "audio_url", "video_url"):
        assert file_of(fetch_links(shown(f"http://{host}/x.png", kind), HERE)) == b"a file"
    assert file_of(fetch_links(shown(f"http://{host}/to=/x.png"), HERE)) == b"a file"


def test_inputs_without_links_are_left_alone() -> None:
    for inputs in (shown("data:image/png;base64,AAAA"), {"prompt": "x"}, {"messages": "x"}, {"messages": [1]}):
        assert fetch_links(inputs, HERE) is inputs
    link = shown("http://127.0.0.1/x.png")
    assert fetch_links(link, MediaLinks()) is link


@pytest.mark.attack("C12")
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("to=http://localhost:1/x.png", "only files of 127.0.0.1 are fetched"),
        ("to=file:///etc/passwd", "files of the replica's host are not read"),
        ("to=gopher://127.0.0.1/", "only files of|nothing is fetched|can't be fetched"),
        ("to=/to=/to=/to=/x.png", "redirected more than 3 times"),
        ("gone", "answered 404"),
    ],
)
def test_a_host_sends_nobody_to_what_is_not_allowed(host: str, path: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        fetch_links(shown(f"http://{host}/{path}"), HERE)


def test_files_are_bounded_in_size_and_time(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="at most 64 MiB together"):
        fetch_links(shown(f"http://{host}/endless"), HERE)
    monkeypatch.setattr(fetch, "MAX_FETCH_S", 0.5)
    began_s = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"within 0\.5 s"):
        fetch_links(shown(f"http://{host}/silent"), HERE)
    assert time.monotonic() - began_s < 20


def test_a_host_that_is_not_there_is_said() -> None:
    with pytest.raises(InvalidRequestError, match="image_url: the link can't be fetched: Connect"):
        fetch_links(shown("http://127.0.0.1:1/x.png"), HERE)


def test_files_of_the_folder_are_read_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "fifo")
    links = MediaLinks(folder=str(folder))
    assert file_of(fetch_links(shown(f"file://{folder}/a%20b.png"), links)) == b"picture"
    for path, said in (
        (f"{folder}/../secret", "not in the folder"),
        (f"{folder}/%2e%2e/secret", "not in the folder"),
        (f"{folder}/link", "not in the folder"),
        (f"{folder}/fifo", "no regular file"),
        (f"{folder}/none", "no such file"),
        (f"{folder}/x%00y", "no such file"),
        (str(folder), "no regular file|no such file"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            fetch_links(shown(f"file://{path}"), links)
