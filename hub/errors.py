"""Errors of the hub's own drivers; they never reach a client untyped.

OmniError
└── SendFailedError             the orchestrator: nothing left this process, another replica may take the work
    ├── QueueFullError              the replica reads too slowly
    └── NotConnectedError           the session to the replica is down
"""

from __future__ import annotations

from omni_discovery.errors import OmniError


class SendFailedError(OmniError):
    """A message was not handed to the socket; the other side can't have seen it."""


class QueueFullError(SendFailedError):
    """The socket's send queue is at its bound."""


class NotConnectedError(SendFailedError):
    """There is no session to send on."""
