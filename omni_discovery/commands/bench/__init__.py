"""``omni bench``: load a running hub, watch it, and tell what its clients saw."""
