"""What this machine has of loopback."""

from __future__ import annotations

import socket
from typing import Final


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


#: Whether there is ::1, beside 127.0.0.1.
HAS_IPV6: Final = _has_ipv6()
