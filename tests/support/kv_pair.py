"""A hub with prefill and decode apart, and what it answers."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.support.hub import Hub
from tests.support.prefill_decode import PROMPTS

_ASKED = {"temperature": 0.0, "max_tokens": 24}
_READY_S = 400.0


@contextmanager
def serving(folder: Path, document: bytes, variables: Mapping[str, str]) -> Iterator[Hub]:
    """A hub that serves the document; ``variables`` are set for it and its replicas."""
    folder.mkdir()
    file = folder / "deploy.yaml"
    file.write_text(json.dumps(msgspec.json.decode(document)))
    hub = Hub(folder, ["--deploy-config", str(file)], variables=variables)
    try:
        yield hub.wait_ready(_READY_S)
    finally:
        hub.stop(signal.SIGINT)


def answers(hub: Hub) -> list[str]:
    """What it says to each of the prompts."""
    said = [hub.ask(prompt, **_ASKED) for prompt in PROMPTS]
    assert [status for status, _ in said] == [200] * len(PROMPTS), said
    return [body["choices"][0]["message"]["content"] for _, body in said]


def ready_prefill(hub: Hub) -> set[int]:
    """The process ids of the prefill replicas that serve."""
    return {each["pid"] for each in hub.replicas() if each["stage_id"] == 0 and each["status"] == "up"}
