"""The HTTP faces of the hub."""
