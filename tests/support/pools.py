"""Short forms for tests of pools."""

from __future__ import annotations

from hub.pool.core import Pool


def accept(pool: Pool, request_id: str) -> None:
    """The replica accepts the request's dispatch; does nothing for one that is not bound."""
    binding = pool.binding(request_id)
    if binding is not None:
        binding.accept()


def spent_credit(pool: Pool, request_id: str) -> bool:
    """Whether the request is bound, and its binding spent a credit."""
    binding = pool.binding(request_id)
    return binding is not None and binding.spent_credit
