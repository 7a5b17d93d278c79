"""The files of the page: nothing from elsewhere, no script inside the page, no HTML that is made of texts."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hub.api.dashboard import pages

STATIC = Path(pages.__file__).with_name("static")
FILES = sorted(STATIC.iterdir())


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def page() -> Tags:
    return Tags((STATIC / "index.html").read_text())


def test_each_file_is_served_with_its_type_and_the_policy() -> None:
    found = pages.load_pages()
    assert found.keys() == {file.name for file in FILES if file.name != "index.html"} | {""}
    for name, answer in found.items():
        assert answer.headers["content-security-policy"] == pages.HEADERS["Content-Security-Policy"]
        assert answer.headers["content-type"].startswith(("text/", "image/svg+xml")), name
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_policy_lets_the_browser_run_and_ask_this_port_alone() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in pages.HEADERS["Content-Security-Policy"].split(";"))
    assert rules["default-src"] == "'none'"
    for name in ("script-src", "style-src", "connect-src"):
        assert rules[name] == "'self'"
    assert rules["frame-ancestors"] == rules["form-action"] == rules["base-uri"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in pages.HEADERS["Content-Security-Policy"]


def test_the_page_loads_its_own_files_and_has_no_script_or_style_inside() -> None:
    for tag, attributes in page().found:
        for name in ("src", "href"):
            link = attributes.get(name)
            assert link is None or link.startswith("#") or (STATIC / link).is_file(), (tag, link)
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert tag != "style"
        assert tag != "script" or attributes.get("type") == "module"


def test_each_field_and_picture_has_a_name_and_no_id_stands_twice() -> None:
    found = page().found
    labels = {attributes.get("for") for tag, attributes in found if tag == "label"}
    for tag, attributes in found:
        if tag in ("input", "textarea") and "hidden" not in attributes:
            assert attributes["id"] in labels, attributes
        if tag == "canvas":
            assert attributes["aria-label"]
        if tag == "section":
            assert attributes.get("aria-labelledby") or attributes.get("aria-label")
    ids = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.attack("C27")
@pytest.mark.parametrize("file", [file for file in FILES if file.suffix == ".js"], ids=lambda file: file.name)
def test_no_module_makes_html_or_code_of_a_text_or_asks_elsewhere(file: Path) -> None:
    text = file.read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert word not in text, word
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    for module in re.findall(r'from "([^"]+)"', text):
        assert (STATIC / module).is_file(), module
    # What the modules look up stands in the page, or is made by them.
    made = set(re.findall(r'id: "([\w-]+)"', text))
    ids = {attributes["id"] for _, attributes in page().found if "id" in attributes} | made
    assert not set(re.findall(r'byId\("([\w-]+)"\)', text)) - ids
