"""The HTTP APIs of the hub."""
