"""What a hub and a replica say to each other: the messages, and the frames that carry them. Pure."""

from omni_discovery.wire import frames, messages
from omni_discovery.wire.frames import *
from omni_discovery.wire.messages import *

__all__: list[str] = []
__all__ += frames.__all__
__all__ += messages.__all__
