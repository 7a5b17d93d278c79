"""Jobs of ``omni serve``: the flags, and the start of what they ask for."""
