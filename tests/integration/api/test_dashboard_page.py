"""The dashboard's page in Chromium, on a hub with text, pictures and sound: what a person sees, hears and does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaRecord, ReplicaStatus, encode_record
from tests.support.browser import Watched, chromium
from tests.support.dashboard import DashboardHub
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


#: Notes each piece of sound that a page plays: when it begins, and how long it is.
LISTEN = """
window.heard = [];
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (at) {
  window.heard.push([at, this.buffer.duration]);
  return start.call(this, at);
};
"""
HOSTILE = '<img src=x onerror="window.taken=1"><script>window.taken=1</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def served(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardHub]:
    hub = DashboardHub(tmp_path_factory.mktemp("page"), kills=True)
    try:
        yield hub.wait_ready()
    finally:
        assert hub.stop() == []


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    with Watched(browser) as made:
        yield made


def row(page: Page, name: str) -> Any:
    return page.locator("#stages tbody tr", has=page.get_by_text(name, exact=True))


def test_a_link_opens_it_and_the_token_is_nowhere_in_an_address(served: DashboardHub, watched: Watched) -> None:
    page = watched.opened(f"{served.link}&ask=what%20is%2026%20%2B%2048%3F")
    assert page.url == served.url
    assert page.input_value("#prompt") == "what is 26 + 48?", "a link may bring a question, too"
    page.get_by_text("Nothing needs you.").wait_for()
    assert page.locator("#stages tbody tr").count() == 5
    assert page.locator("#graph").get_by_text("5 replicas").count() == 0
    page.get_by_text("live", exact=False).first.wait_for()
    assert not [url for url in watched.urls if served.token in url]
    origin = str(httpx.URL(served.url).copy_with(path="/"))
    assert all(url.startswith((origin, "data:")) for url in watched.urls), "nothing comes from elsewhere"
    assert watched.complaints == []
    assert page.evaluate("document.cookie") == "", "no script reads the cookie"
    assert served.token not in page.evaluate("JSON.stringify(sessionStorage)")


def test_who_comes_without_a_token_logs_in_with_the_keyboard(served: DashboardHub, watched: Watched) -> None:
    page = watched.page
    page.goto(served.url)
    page.wait_for_selector("#log-in:not([hidden])")
    assert page.locator("#main").is_hidden()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("This token opens nothing here").wait_for()
    page.locator("#token").focus()
    page.keyboard.type(served.token)
    page.keyboard.press("Enter")
    page.wait_for_selector("#graph svg")
    page.locator("#log-out").click()
    page.wait_for_selector("#log-in:not([hidden])")
    assert page.locator("#main").is_hidden()


def test_an_answer_is_read_seen_and_heard_as_it_comes(served: DashboardHub, watched: Watched) -> None:
    watched.page.add_init_script(LISTEN)
    page = watched.opened(served.link)
    page.fill("#prompt", "to be or not to be")
    page.locator("#prompt").press("Tab")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator("#answer-text").get_by_text("to be").wait_for()
    wait_for("the first sound", lambda: page.evaluate("window.heard.length"))
    page.get_by_text("all of it after").wait_for()
    assert page.inner_text("#answer-text") == "to be or not to be"
    assert page.locator("#answer-pictures img").evaluate("(img) => img.decode().then(() => img.naturalWidth)") > 0
    assert "1.5 s of sound so far, in 6 pieces" in page.inner_text("#sound-state")
    heard = page.evaluate("window.heard")
    assert [round(length, 3) for _, length in heard] == [0.25] * 6
    begins = [at for at, _ in heard]
    assert all(later - earlier > 0.249 for earlier, later in pairwise(begins)), "one at a time"
    assert page.get_by_text("stage 2:").count() == 1
    assert watched.complaints == []
    way = page.get_by_role("dialog")
    page.get_by_role("button", name="The way of this request").click()
    way.get_by_text("stage 0 → 2").wait_for()
    page.keyboard.press("Escape")
    page.fill("#prompt", "kaputt")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator("#answer-error").get_by_text("kaputt").wait_for()
    slow = page.locator("#slow-list button").first
    slow.focus()
    page.keyboard.press("Enter")
    way.get_by_text("● ok").wait_for()
    assert way.locator(".waterfall li").count() == 3
    assert way.get_by_text("stage 0 → 2").count() == 1
    assert way.locator(".bar.makes").first.evaluate("(bar) => bar.getBoundingClientRect().width") > 1
    page.keyboard.press("Escape")
    page.locator("#failed-list button", has_text="EngineFailedError").first.click()
    way.get_by_text("✖ failed: EngineFailedError").wait_for()
    way.get_by_role("button", name="Close").click()


def test_a_replica_is_cordoned_and_let_in_again_from_the_keyboard(served: DashboardHub, watched: Watched) -> None:
    page = watched.opened(served.link)
    row(page, "1/1").get_by_role("button", name="Act on 1/1").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Cordon").press("Enter")
    dialog.get_by_text("is cordoned: it takes nothing new").wait_for()
    page.keyboard.press("Escape")
    assert dialog.is_hidden()
    row(page, "1/1").get_by_text("○ cordoned").wait_for()
    page.locator("#events").get_by_text("is cordoned").wait_for()
    page.locator("#needs-list").get_by_text("replica 1/1 is kept from new work").wait_for()
    row(page, "1/0").get_by_role("button", name="Act on 1/0").click()
    dialog.get_by_role("button", name="Drain").click()
    dialog.get_by_text("no other replica of stage 1 takes work").wait_for()
    assert dialog.get_by_role("button", name="Do it all the same").is_visible()
    dialog.get_by_role("button", name="Close").click()
    row(page, "1/1").get_by_role("button", name="Act on 1/1").click()
    dialog.get_by_role("button", name="Let it take work again").click()
    dialog.get_by_text("takes work again").first.wait_for()
    row(page, "1/1").get_by_text("● up").wait_for()


def apart(work: Coroutine[Any, Any, None]) -> None:
    """Run it in a thread: playwright has a loop in this one."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, work).result(60)


async def _put_hostile(endpoint: str, key: str) -> None:
    """Write a record whose texts a page might take for HTML."""
    record = ReplicaRecord(
        stage_id=0,
        replica_id=7,
        input_addr="tcp://127.0.0.1:9",
        output_addr="tcp://127.0.0.1:9",
        status=ReplicaStatus.ERROR,
        reason=HOSTILE,
        host=HOSTILE,
        device=HOSTILE,
        version=HOSTILE,
    )
    kv = EtcdKV(endpoint)
    try:
        await kv.put(key, encode_record(record))
    finally:
        await kv.close()


async def _delete(endpoint: str, key: str) -> None:
    kv = EtcdKV(endpoint)
    try:
        await kv.delete(key)
    finally:
        await kv.close()


@pytest.mark.attack("C27")
def test_what_a_record_says_is_text_whatever_it_says(served: DashboardHub, watched: Watched) -> None:
    page = watched.opened(served.link)
    key = keys.replica_key("test", 0, 7)
    apart(_put_hostile(served.hub.endpoint, key))
    try:
        row(page, "0/7").get_by_text(HOSTILE).first.wait_for()
        page.locator("#needs-list").get_by_text(HOSTILE).first.wait_for()
        page.locator("#events").get_by_text(HOSTILE).first.wait_for()
        assert page.evaluate("window.taken") is None
        assert page.locator('img[src="x"]').count() == 0
        assert watched.complaints == []
        # Even a bug of the page would not run it.
        with pytest.raises(Exception, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<b>x</b>'")
    finally:
        apart(_delete(served.hub.endpoint, key))
    row(page, "0/7").wait_for(state="detached")


def test_a_phone_and_the_dark_have_all_of_it(served: DashboardHub, browser: Browser) -> None:
    small = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "color_scheme": "dark"}
    with Watched(browser, **small) as watched:
        page = watched.opened(served.link)
        page.get_by_text("fine, made").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        box = page.locator("#graph svg").bounding_box()
        assert box is not None
        assert box["width"] <= 360
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in colour.strip("rgb()").split(",")) < 64, colour
        for name in ("0/0", "2/0"):
            assert row(page, name).get_by_role("button", name="Act on").is_visible()
        words = page.locator("#stages .tone").all_inner_texts()
        assert all(word.startswith("● up") for word in words), "a word and a sign beside the colour"


def test_a_replica_is_killed_in_mid_answer_and_the_answer_goes_on(served: DashboardHub, watched: Watched) -> None:
    """The button is there because this hub was started as a demo starts it."""
    page = watched.opened(served.link)
    words = " ".join(f"word{number}" for number in range(40))
    page.fill("#prompt", words)
    page.get_by_role("checkbox", name="sound").uncheck()
    page.get_by_role("button", name="Ask, and kill a replica meanwhile").click()
    page.get_by_text("all of it after").wait_for()
    assert page.inner_text("#answer-text") == words
    page.get_by_text("the answer came to its end all the same").wait_for()
    page.locator("#answer-facts").get_by_text("killed replica 0/").wait_for()
    page.locator("#events").get_by_text("does not answer this hub").first.wait_for()
    # Its supervisor starts another one.
    wait_for("two that are up", lambda: page.locator("#stages tbody tr").filter(has_text="● up").count() == 5, 60)
    assert watched.complaints == []


def test_a_session_that_was_ended_shows_nothing_more(served: DashboardHub, watched: Watched) -> None:
    page = watched.opened(served.link)
    page.get_by_text("● live").wait_for()
    with served.client() as http:
        cookies = watched.context.cookies(served.url)
        assert len(cookies) == 1
        # The page's own stream ends with its session, and the page asks for the token again.
        name, value = cookies[0].get("name", ""), cookies[0].get("value", "")
        http.post("logout", json={}, headers={"Cookie": f"{name}={value}"})
    page.wait_for_selector("#log-in:not([hidden])")
    wait_for("the page to be empty", lambda: page.locator("#main").is_hidden())
