"""API keys are taken out of a command line with all that belongs to them, and nothing else is."""

from __future__ import annotations

import pytest

from hub.api.door.command_line import shows_key, without_keys


@pytest.mark.attack("A29")
@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("omni serve m", "omni serve m"),
        ("omni serve m --api-key k", "omni serve m"),
        ("omni serve m --api-key k1 k2 --port 0", "omni serve m --port 0"),
        ("omni serve --api-key=k m", "omni serve m"),
        ("omni serve --api_key=k --api_key k2 --api-key k3 -ora h", "omni serve -ora h"),
        ("omni serve --api-key-file f --api-keys-from-etcd", "omni serve --api-key-file f --api-keys-from-etcd"),
        ("omni serve --port 0 -- --api-key k", "omni serve --port 0 -- --api-key k"),
    ],
)
def test_only_the_keys_go(words: str, left: str) -> None:
    assert without_keys(words.split()) == left.split()
    assert shows_key(words.split()) == (words != left)
