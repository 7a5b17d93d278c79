"""A function in a process of its own, of an ordinary user, with an end to it: for files that two users share."""

from __future__ import annotations

import codecs
import json
import os
import select
import signal
import traceback
from collections.abc import Callable
from typing import Any, Final

from tests.support.binaries import absent

#: The user "nobody" on all Linux machines.
NOBODY: Final = 65534
_LIMIT_S: Final = 60.0


def require_root() -> None:
    """To be two users, the tests must run as root."""
    if os.geteuid() != 0:
        absent("only root can be another user")


def as_ordinary_user(function: Callable[[], Any]) -> Any:
    """The function's result, which must be JSON, from a process without root's rights; what it raises fails the test.

    Where the tests run as root, what they make themselves is another user's for that process.
    """
    # The interpreter's own files may be readable to root alone: what it would load later is loaded here.
    for encoding in ("ascii", "idna"):
        codecs.lookup(encoding)
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        _run(function, sending)
    os.close(sending)
    try:
        ready, _, _ = select.select([receiving], [], [], _LIMIT_S)
        assert ready, "the other process hangs"
        with os.fdopen(os.dup(receiving), "rb") as answers:
            result, error = json.loads(answers.read())
    finally:
        os.close(receiving)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not error, error
    return result


def _run(function: Callable[[], Any], sending: int) -> None:
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        answer = [function(), ""]
    except Exception:  # noqa: BLE001 - told to the test
        answer = [None, traceback.format_exc()]
    os.write(sending, json.dumps(answer).encode())
    os._exit(0)
