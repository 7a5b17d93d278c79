"""The page of log events has each event that the code logs, and no other."""

from __future__ import annotations

from tests.support import events


def test_every_event_that_is_logged_is_explained_and_every_one_that_is_explained_is_logged() -> None:
    """A new event gets a line in ``MEANINGS`` of tests/support/events.py."""
    assert events.events().keys() == events.MEANINGS.keys()


def test_every_line_begins_with_an_event_but_the_few_whose_event_is_computed() -> None:
    unnamed = {call.place.rpartition(":")[0] for call in events.calls() if not call.event}
    assert unnamed == events.UNNAMED.keys()
    assert {name for name in events.UNNAMED.values() if "." in name} <= events.MEANINGS.keys()


def test_an_event_is_found_however_its_text_is_made() -> None:
    source = """
def run(self, who):
    logger.info("a.plain stage=%d: %s", 1, who)
    text = f"b.variable stage=%d {who} code=%d"
    logger.warning(text, 1, 2)
    logger.log(level, "c.level" + ": %s" * bool(who), who)
    text = "".join(["d.joined stage=%d", *more])
    logger.error(text, 1)
    logger.info("%s", who)
"""
    found = [(call.method, call.event) for call in events.calls_in(source, "x.py")]
    assert found == [
        *(("info", "a.plain"), ("warning", "b.variable"), ("log", "c.level"), ("error", "d.joined"), ("info", "")),
    ]


def test_the_page_shows_levels_and_fields() -> None:
    made = events.events()["supervisor.gave_up"]
    assert (made.levels, made.fields[:2]) == (("error",), ("stage", "code"))
    assert made.name in events.events_page("", lambda head, rows: [str(row) for row in rows])
