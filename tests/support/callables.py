"""What the torch engine is told to call in tests: everything that users may write, and what they should not."""

from __future__ import annotations

import asyncio
import hashlib
import io
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image, ImageOps

from omni_discovery.data_urls import picture_parts, read_picture

#: What ``speak`` has begun and closed, in order.
SEEN: list[str] = []
#: Set where ``stuck`` may go on.
GO_ON = threading.Event()


class Words(msgspec.Struct):
    """A client's words; ``text`` of a stage before."""

    prompt: str = ""
    text: str = ""
    repeat: int = 1
    fail: bool = False


class Noise(msgspec.Struct):
    seed: int
    size: int = 4


@dataclass
class Told:
    """A dataclass does as well."""

    prompt: str
    numbers: list[int] = field(default_factory=list)
    array: np.ndarray[Any, Any] | None = None
    tensor: torch.Tensor | None = None
    nested: Noise | None = None


class Handed(msgspec.Struct):
    """Everything there is to be told."""

    payloads: dict[int, dict[str, Any]] = {}
    pieces: list[dict[str, Any]] = []
    companions: dict[str, dict[int, dict[str, Any]]] = {}


class Song(msgspec.Struct):
    """A text, whole or in pieces."""

    text: str = ""
    pieces: list[Words] = []


class Lines(msgspec.Struct):
    """Words of a client, and then lines of a stage before, as they come."""

    pieces: AsyncIterator[Words]
    prompt: str = ""


class Chat(msgspec.Struct):
    """What the client said, with its pictures."""

    messages: list[dict[str, Any]]


class Samples(msgspec.Struct):
    tensor: torch.Tensor


def look(said: Chat) -> str:
    """Says what each picture is and which bytes it has."""
    pictures = [read_picture(shown) for shown in picture_parts(said.messages)]
    return " ".join(f"{mime} {hashlib.sha256(file).hexdigest()}" for mime, file in pictures)


def echo(said: Words) -> tuple[str, dict[str, str]]:
    """Shows the words and hands them over."""
    if said.fail:
        raise RuntimeError("it was told to fail")
    words = (said.prompt or said.text) * said.repeat
    return words, {"text": words}


def speak(said: Words) -> Iterator[tuple[str, dict[str, str]]]:
    """One word after the other, each shown and handed over."""
    SEEN.append("begun")
    try:
        for word in (said.prompt or said.text).split():
            if word == "FAIL":
                raise RuntimeError("it was told to fail")
            yield word + " ", {"text": word + " "}
    finally:
        SEEN.append("closed")


async def recite(lines: Lines) -> AsyncIterator[tuple[str, dict[str, str]]]:
    """As ``speak``, of words that come while it speaks; says at the end that it is over."""
    SEEN.append("begun")
    try:
        for word in lines.prompt.split():
            yield word + " ", {"text": word + " "}
        async for line in lines.pieces:
            for word in line.text.split():
                if word == "FAIL":
                    raise RuntimeError("it was told to fail")
                yield word + " ", {"text": word + " "}
        yield "over", {"text": "over"}
    finally:
        SEEN.append("closed")


class Reciter:
    """An object that does the same."""

    async def __call__(self, lines: Lines) -> AsyncIterator[str]:
        async for line in lines.pieces:
            yield line.text


async def sleepy(lines: Lines) -> AsyncIterator[str]:
    """Waits for what nobody brings."""
    await asyncio.sleep(0)
    yield lines.prompt


def no_generator(lines: Lines) -> str:
    return lines.prompt


def hand_on(said: Words) -> Iterator[dict[str, str]]:
    """Hands the words over, one by one, and shows nothing."""
    for word in said.prompt.split():
        yield {"text": word}


def hand_text_on(said: Words) -> dict[str, str]:
    return {"text": said.prompt}


def count_pieces(handed: Handed) -> str:
    return f"{len(handed.pieces)} pieces, {len(handed.payloads)} payloads, {sorted(handed.companions)}"


def repeat_told(told: Told) -> str:
    parts = [told.prompt, str(told.numbers), str(told.nested.size if told.nested else None)]
    parts += ["array" if isinstance(told.array, np.ndarray) else "", "tensor" if torch.is_tensor(told.tensor) else ""]
    return " ".join(parts)


def shout(batch: list[Words]) -> list[Any]:
    """A batch; the word FAIL fails all of it, the word ALONE only its own request."""
    SEEN.append(f"batch of {len(batch)}")
    if any(said.prompt == "FAIL" for said in batch):
        raise RuntimeError("it was told to fail")
    return [ValueError("alone") if said.prompt == "ALONE" else said.prompt.upper() for said in batch]


def hum(noise: Noise) -> Iterator[np.ndarray[Any, Any]]:
    """Two pieces of sound."""
    for seed in (noise.seed, noise.seed + 1):
        yield np.random.default_rng(seed).uniform(-1, 1, noise.size)


def sing(song: Song) -> Iterator[torch.Tensor]:
    """A sample for each letter, in two pieces of sound."""
    text = song.text or "".join(piece.text for piece in song.pieces)
    samples = torch.tensor([ord(letter) / 256 for letter in text])
    yield samples[:4]
    yield samples[4:]


def paint(noise: Noise) -> Image.Image:
    return Image.new("L", (noise.size, noise.size), noise.seed % 256)


def give(said: Words) -> Any:
    """Returns what can't be put out."""
    return {"list": [1], "bytes": b"what", "int": 5, "text": "text", "exit": None}[said.prompt]


def measure(said: Words) -> torch.Tensor:
    return torch.tensor([len(said.prompt)])


def leave(said: Words) -> str:
    raise SystemExit(said.prompt)


def stuck(said: Words) -> str:
    GO_ON.wait(60.0)
    return said.prompt


def short_batch(batch: list[Words]) -> list[str]:
    return ["one"]


def untyped(prompt):  # type: ignore[no-untyped-def]
    return prompt


def two(first: Words, second: Words) -> str:
    return first.prompt + second.prompt


async def later(said: Words) -> str:
    return said.prompt


class Doubler(torch.nn.Module):
    """A module: doubles what it gets, by a weight. Hands it over."""

    def __init__(self, factor: float = 2.0, device: str = "none", model: str = "") -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))
        self.told_device, self.told_model = device, model

    def forward(self, given: Samples) -> torch.Tensor:
        if given.tensor.numel() == 0:
            raise torch.OutOfMemoryError("out of memory")
        assert not torch.is_grad_enabled()
        return given.tensor * self.factor


class Greeter:
    """No module: an ordinary class, built with its arguments."""

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    def __call__(self, said: Words) -> str:
        return f"{self.greeting}, {said.prompt}"


def make_greeter(greeting: str) -> Greeter:
    return Greeter(greeting)


ready_made = Greeter("good day")
NO_CALLABLE: Mapping[str, int] = {}


class Edit(msgspec.Struct):
    """Pictures to be edited, and a mask, as a client's form has them."""

    messages: list[dict[str, Any]]
    prompt: str = ""
    mask: str = ""
    seed: int | None = None


def inverted(edit: Edit) -> Iterator[bytes]:
    """Each picture with its colours inverted, where the mask is transparent; with the prompt ``fail``, none."""
    for part in picture_parts(edit.messages):
        if edit.prompt == "fail":
            raise RuntimeError("it was told to fail")
        picture = Image.open(io.BytesIO(read_picture(part)[1])).convert("RGB")
        changed = ImageOps.invert(picture)
        if edit.mask:
            kept = Image.open(io.BytesIO(read_picture(edit.mask)[1])).convert("RGBA").getchannel("A")
            changed.paste(picture, mask=kept)
        file = io.BytesIO()
        changed.save(file, "PNG")
        yield file.getvalue()
