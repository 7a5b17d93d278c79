"""The errors of a replica, under the project's root.

OmniError
├── SerializationError      the other stage: the bytes are no hand-off of ours, or hold what can't be sent
├── PayloadError            nobody: the hand-off is gone; the stage before has to run again
├── ControlRefusedError     whoever called: the engine has no such method, it is not allowed, or says too much
├── NotResumableError       the client: asks anew; the answer can't be continued exactly as it was begun
└── EngineDeadError         the operator: the engine raised; the process ends and is started anew
"""

from __future__ import annotations

from omni_discovery.errors import OmniError


class SerializationError(OmniError, ValueError):
    """An object can't be written as a hand-off, or bytes can't be read as one."""


class PayloadError(OmniError):
    """A hand-off could not be stored or is not there any more."""


class NotResumableError(OmniError):
    """What another replica has shown of an answer can't be continued here exactly; the message says why."""


class ControlRefusedError(OmniError):
    """A control call is not carried out, or what came of it can't be said; the message says why."""


class EngineDeadError(OmniError):
    """The engine raised while it worked; nothing it holds can be finished."""
