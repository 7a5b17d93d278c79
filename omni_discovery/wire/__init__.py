"""The wire format between hubs and replicas over ZMQ: messages, frames, the session protocol. Pure."""

from omni_discovery.wire import frames, messages
from omni_discovery.wire.frames import *
from omni_discovery.wire.incoming import Incoming
from omni_discovery.wire.messages import *

__all__: list[str] = ["Incoming"]
__all__ += frames.__all__
__all__ += messages.__all__
