"""Behind which steps of a picture an unfinished one is shown. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from omni_discovery.wire import MAX_PARTIAL_IMAGES

#: The parameter of a picture that asks for unfinished ones before it.
PartialImages = Annotated[int, Meta(ge=0, le=MAX_PARTIAL_IMAGES)]


def steps_shown(steps: int, count: int) -> tuple[int, ...]:
    """The numbers of done steps, rising, behind which ``count`` unfinished pictures are shown, evenly spread.

    All are before the last step, so that there are fewer pictures where there are not more steps.
    """
    count = min(count, steps - 1)
    return tuple(number * steps // (count + 1) for number in range(1, count + 1))
