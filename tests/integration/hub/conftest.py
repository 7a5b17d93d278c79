"""What several tests of hubs begin with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from omni_discovery.curve import KeyPair


@pytest.fixture
def keys() -> KeyPair:
    """The key pair of the test's hub."""
    return KeyPair.generate()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes at the test's end what it was given, last first."""
    with ExitStack() as opened:
        yield opened
