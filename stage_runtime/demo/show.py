"""The demo's output in a terminal: answers with pictures, figures, next steps."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stage_runtime.demo.http_client import json_headers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from stage_runtime.demo.http_client import Reply
    from stage_runtime.demo.measure import Numbers, SpeechNumbers

#: Height of a picture in terminal rows; each row shows two rows of pixels.
_ROWS: Final = 8
#: From ink to paper, for terminals without colour.
_INK: Final = "@%#*+=-:. "


def has_colour(console: Console) -> bool:
    """Whether what it prints is coloured: on a terminal that can be, unless ``NO_COLOR`` is set."""
    return console.color_system is not None and not console.no_color


def picture(png: bytes, *, colour: bool) -> Text:
    """The image in characters, two pixels for each: half blocks where there is colour, else shades of ink."""
    image = Image.open(io.BytesIO(png)).convert("L")
    height = 2 * _ROWS
    image = image.resize((round(image.width * height / image.height), height), Image.Resampling.LANCZOS)
    pixels = np.asarray(image).tolist()
    text = Text()
    for row in range(0, height, 2):
        for column in range(image.width):
            above, below = pixels[row][column], pixels[row + 1][column]
            if colour:
                text.append("▀", style=f"rgb({above},{above},{above}) on rgb({below},{below},{below})")
            else:
                text.append(_INK[(above + below) * len(_INK) // 512])
        text.append("\n")
    text.rstrip()
    return text


def answer_panel(question: str, reply: Reply, *, colour: bool) -> Panel:
    """One question with its text and, if there is one, its picture."""
    body = Table.grid(padding=(0, 2))
    body.add_column(vertical="middle", min_width=34)
    body.add_column()
    words = Text.assemble((f"{question}\n\n", "bold"), (reply.text, "green"), (f"\n\n{reply.seconds:.2f} s", "dim"))
    body.add_row(words, picture(reply.png, colour=colour) if reply.png else Text("(no picture)", style="dim"))
    return Panel.fit(body, border_style="dim")


def numbers_table(numbers: Numbers | SpeechNumbers) -> Table:
    """The figures as a table, one row each."""
    table = Table(title="measured in this run", title_justify="left", show_header=False, border_style="dim")
    table.add_column(style="dim")
    table.add_column()
    for name, value in numbers.lines():
        table.add_row(name, value)
    return table


def ask_step(url: str) -> str:
    """The command that asks a sum."""
    key = """ -H "Authorization: Bearer $VLLM_API_KEY\"""" if "Authorization" in json_headers() else ""
    return f"""curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
  -d '{{"messages": [{{"role": "user", "content": "what is 26 + 48?"}}], "modalities": ["text"]}}'"""


def speak_step(url: str) -> str:
    """The command that has a sum answered aloud."""
    key = """ -H "Authorization: Bearer $VLLM_API_KEY\"""" if "Authorization" in json_headers() else ""
    return f"""curl -s {url}/v1/audio/speech -H 'Content-Type: application/json'{key} \\
  -d '{{"input": "what is 26 + 48?", "voice": "default", "response_format": "wav"}}' > answer.wav"""


def next_steps(first: str, omni: str, etcdctl: str, endpoint: str, namespace: str) -> Iterable[str]:
    """Commands to copy into another terminal; ``first`` is the request."""
    yield first
    yield f"ETCDCTL_ENDPOINTS={endpoint} {etcdctl} get --prefix /omni/v1/"
    yield f"{omni} replicas --namespace {namespace} --watch"
