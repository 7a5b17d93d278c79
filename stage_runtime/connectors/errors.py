"""The errors of moving hand-offs between two stages' connectors.

OmniError
└── TransferError                the caller: the hand-off can't be fetched; the earlier stage may have to run again
    ├── TransferTimeoutError     the caller: the deadline passed first
    ├── TransferCancelledError   no one: the caller itself cancelled the fetch
    └── EdgeFullError            the operator: more is in flight on the edge than its limits allow
"""

from __future__ import annotations

import errno

from omni_discovery.errors import OmniError


class TransferError(OmniError, OSError):
    """A hand-off could not be moved; its producer may be gone."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A hand-off did not come within its time."""


class TransferCancelledError(TransferError):
    """A fetch was ended by ``cancel`` or ``close``."""


class EdgeFullError(TransferError):
    """An edge holds as much as ``window_size``, ``max_inflight`` or ``max_inflight_bytes`` allow."""


def lacks_descriptors(error: BaseException) -> bool:
    """Whether it was raised, itself or at its root, because this process or host can open nothing more."""
    return _has_errno(error, errno.EMFILE, errno.ENFILE)


def lacks_room(error: BaseException) -> bool:
    """Whether it was raised, itself or at its root, because this side's own pool is full."""
    return _has_errno(error, errno.ENOBUFS)


def _has_errno(error: BaseException, *numbers: int) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in numbers:
            return True
        cause = cause.__cause__
    return False
