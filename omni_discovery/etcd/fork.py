"""Import gRPC without its handlers for fork; import this before grpc.

With them, a forked child of a process that has a client starts gRPC's threads anew and dies of it, before anything can
tell it that clients don't survive a fork. Without them the child is left alone. gRPC reads the setting once, as it is
imported; the environment is as it was afterwards, and somebody's own choice is respected.
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
