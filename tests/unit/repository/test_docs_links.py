"""Every relative link and anchor of the documentation leads somewhere, and every page is reachable from the index."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INDEX = ROOT / "docs" / "index.md"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
#: Files outside the documentation that name pages of it.
NAMING = sorted(
    path
    for folder in ("compose", "hub", "omni_discovery", "stage_runtime", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".yaml", ".service"}
)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_IMAGE = re.compile(r'<img src="([^"]+)"')
_HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
_NAMED = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code, in which nothing is a link or a heading."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link may name behind ``#``, as renderers of Markdown make it from the headings."""
    found: list[str] = []
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        same = sum(each == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", each) is not None for each in found)
        found.append(f"{slug}-{same}" if same else slug)
    return frozenset(found)


def links(page: Path) -> list[str]:
    """Relative links of a page, those to images included."""
    text = re.sub(r"`[^`\n]*`", "", prose(page)) if page.suffix == ".md" else ""
    found = [*_LINK.findall(prose(page)), *_IMAGE.findall(text)]
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def target(page: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = link.partition("#")
    return (page.parent / path).resolve() if path else page, anchor


def wrong(page: Path, link: str) -> str:
    """Why a link leads nowhere; empty if it does."""
    path, anchor = target(page, link)
    if not path.exists():
        return f"{link}: there is no such file"
    if anchor and (path.suffix != ".md" or anchor not in anchors(path)):
        return f"{link}: there is no such heading"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert [reason for link in links(page) if (reason := wrong(page, link))] == []


def test_pages_that_other_files_name_are_there() -> None:
    found = {(path, name) for path in NAMING for name in _NAMED.findall(path.read_text(encoding="utf-8"))}
    assert found
    assert [f"{path}: {reason}" for path, name in found if (reason := wrong(ROOT / "README.md", name))] == []


def test_every_page_is_reachable_from_the_index() -> None:
    reached, todo = {INDEX}, [INDEX]
    while todo:
        page = todo.pop()
        for link in links(page):
            path, _ = target(page, link)
            if path.suffix == ".md" and path not in reached and path.exists():
                reached.add(path)
                todo.append(path)
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in reached] == []


def test_headings_of_one_page_differ() -> None:
    """An anchor that counts headings of the same name changes its meaning when one is added."""
    for page in PAGES:
        headings = [heading.lower() for heading in _HEADING.findall(prose(page))]
        assert len(set(headings)) == len(headings), page


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    """The check itself."""
    page = tmp_path / "page.md"
    page.write_text("# One `two`: three\n\n[a](#one-two-three) [b](#none) [c](none.md) [d](page.md#one-two-three)\n")
    assert [bool(wrong(page, link)) for link in links(page)] == [False, True, True, False]
