"""The size of a picture, from its file."""

from __future__ import annotations

from hub.api.images.drawing import size_of
from stage_runtime.engines.echo.engine import draw_png


def test_the_size_of_a_picture_is_read_from_its_file() -> None:
    assert size_of(draw_png("a", 24)) == "24x24"
    assert size_of(b"GIF89a" + bytes(40)) == ""
    assert size_of(draw_png("a")[:20]) == ""
