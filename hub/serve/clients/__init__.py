"""What clients may do to a hub over HTTP: the flags of ``omni serve``."""
