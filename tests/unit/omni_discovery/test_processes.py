"""What a process takes of its machine before it begins."""

from __future__ import annotations

import resource

import pytest

from omni_discovery import processes
from omni_discovery.errors import ConfigError
from omni_discovery.processes import LEAST_FILES, raise_descriptor_limit


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Soft and hard, as the kernel would keep them."""
    kept = [64, LEAST_FILES]
    monkeypatch.setattr(processes.resource, "getrlimit", lambda _: tuple(kept))
    monkeypatch.setattr(processes.resource, "setrlimit", lambda _, both: kept.__setitem__(slice(2), list(both)))
    return kept


@pytest.mark.parametrize("hard", [LEAST_FILES, 100_000, resource.RLIM_INFINITY])
def test_all_the_files_that_are_allowed_are_taken(limits: list[int], hard: int) -> None:
    limits[1] = hard
    raise_descriptor_limit("a hub")
    assert limits == [hard, hard]


def test_too_few_are_refused_with_whom_how_many_and_what_to_do(limits: list[int]) -> None:
    limits[:] = [60, LEAST_FILES - 1]
    with pytest.raises(ConfigError, match=r"only 255 files .* a hub needs 256 at least; raise the hard limit"):
        raise_descriptor_limit("a hub")
    assert limits == [60, 255]
