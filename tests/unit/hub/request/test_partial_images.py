"""RequestMachine and unfinished pictures: shown once and in order, and no part of what another replica must repeat."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hub.request import events as ev
from omni_discovery.wire import FailureKind
from tests.support.request_walk import PAIR, Walk, chunk, finish_of, heard, of

PICTURE = b"\x89PNG whole"


class Painting(Walk):
    """The painter is at work, and what it says is told by ``unfinished`` and ``picture``."""

    def __init__(self, deploy: str = PAIR, wanted: str = "image") -> None:
        super().__init__(deploy, modalities=[wanted])
        self.tell(ev.Submitted())
        self.accepted(0)
        self.done(0, 0, to=[1])
        self.accepted(1)

    def unfinished(self, number: int, file: bytes = b"") -> list[tuple[int | None, bytes]]:
        return self._say(file or f"unfinished {number}".encode(), partial_image=number)

    def picture(self, file: bytes = PICTURE) -> list[tuple[int | None, bytes]]:
        return self._say(file)

    def _say(self, file: bytes, **more: Any) -> list[tuple[int | None, bytes]]:
        seq = self.machine.runs[1].next_seq
        message = msgspec.structs.replace(chunk(seq, ""), modality="image", mime="image/png", **more)
        actions = self.tell(heard(1, self.attempt(1), message, [file]))
        return [(action.output.partial_image, action.output.data) for action in of(actions, ev.Emit)]

    def end(self) -> ev.Finish:
        return finish_of(self.done(1, self.machine.runs[1].next_seq))


def test_unfinished_pictures_come_before_the_picture_with_their_numbers() -> None:
    walk = Painting()
    assert walk.unfinished(0) == [(0, b"unfinished 0")]
    assert walk.unfinished(1) == [(1, b"unfinished 1")]
    assert walk.picture() == [(None, PICTURE)]
    assert walk.end().outcome is ev.Outcome.OK


@pytest.mark.parametrize("deterministic", [(), (0, 1)])
def test_the_next_painter_shows_none_twice_and_goes_on_behind_them(deterministic: tuple[int, ...]) -> None:
    """1. two unfinished pictures were shown, and the painter dies
    2. the next one draws the same again: 0 and 1 are dropped, 2 and the picture are shown
    """
    walk = Painting()
    walk.deterministic = set(deterministic)
    walk.unfinished(0)
    walk.unfinished(1)
    walk.lost(1)
    walk.accepted(1, replica_id=1)
    assert [walk.unfinished(number) for number in range(3)] == [[], [], [(2, b"unfinished 2")]]
    assert walk.picture() == [(None, PICTURE)]
    assert walk.end().outcome is ev.Outcome.OK


def test_the_next_painter_need_not_make_any() -> None:
    """It may be of the release before, which knows of none: the picture is no less for that."""
    walk = Painting()
    walk.unfinished(0)
    walk.lost(1)
    walk.accepted(1, replica_id=1)
    assert walk.picture() == [(None, PICTURE)]
    assert walk.end().outcome is ev.Outcome.OK


def test_behind_a_picture_that_was_shown_only_what_belongs_to_the_next_is() -> None:
    """1. the painter has shown one picture whole and one unfinished of the second, and dies
    2. the next one begins anew: all of the first picture and unfinished 0 of the second are dropped
    """
    walk = Painting()
    walk.unfinished(0)
    walk.picture(b"first")
    assert walk.unfinished(0) == [(0, b"unfinished 0")]
    walk.lost(1)
    walk.accepted(1, replica_id=1)
    assert walk.unfinished(0) == walk.unfinished(1) == walk.picture(b"first") == walk.unfinished(0) == []
    assert walk.unfinished(1) == [(1, b"unfinished 1")]
    assert walk.picture(b"second") == [(None, b"second")]
    assert walk.end().outcome is ev.Outcome.OK


def test_with_the_hand_off_gone_too_the_request_begins_anew_though_unfinished_pictures_were_shown() -> None:
    walk = Painting()
    walk.unfinished(0)
    (dispatch,) = of(walk.failed(1, FailureKind.PAYLOAD), ev.Dispatch)
    assert dispatch.stage_id == 0
    walk.accepted(0, replica_id=1)
    walk.done(0, 0, to=[1])
    walk.accepted(1, replica_id=1)
    assert walk.unfinished(0) == []
    assert walk.unfinished(1) == [(1, b"unfinished 1")]


def test_numbers_that_go_back_are_dropped_and_nobody_hears_those_of_a_stage_that_is_not_wanted() -> None:
    walk = Painting()
    walk.unfinished(1)
    assert walk.unfinished(0) == walk.unfinished(1) == []
    hidden = Painting(PAIR.replace("}]", "}, {stage_id: 2, engine: e, final_output: audio}]"), wanted="audio")
    assert hidden.unfinished(0) == hidden.picture() == []


def test_the_first_output_names_the_replicas_even_if_it_is_unfinished() -> None:
    walk = Painting()
    seq = walk.machine.runs[1].next_seq
    message = msgspec.structs.replace(chunk(seq, ""), modality="image", partial_image=0)
    (first,) = of(walk.tell(heard(1, 0, message, [b"x"])), ev.Emit)
    assert first.output.replicas == ("0/0", "1/0")


@pytest.mark.parametrize("can", [True, False])
def test_only_a_replica_that_can_give_some_is_asked(can: bool) -> None:
    walk = Walk(params={"partial_images": 2, "steps": 9})
    (dispatch,) = of(walk.tell(ev.Submitted()), ev.Dispatch)
    asked = dispatch.params_for(deterministic=False, partial_images=can)
    assert asked == ({"partial_images": 2, "steps": 9} if can else {"steps": 9})
