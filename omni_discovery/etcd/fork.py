"""Import gRPC without its fork handlers; import this module before grpc.

With them, a forked child of a process that has a client restarts gRPC's threads and crashes, before it can be reported
that clients don't survive a fork. gRPC reads the setting once, when it is imported. The environment is restored
afterwards, and a setting that the user made is left as it is.
"""

from __future__ import annotations

import os
import sys

_NAME = "GRPC_ENABLE_FORK_SUPPORT"

if "grpc" not in sys.modules and _NAME not in os.environ:
    os.environ[_NAME] = "0"
    try:
        import grpc.aio  # noqa: F401
    finally:
        del os.environ[_NAME]
