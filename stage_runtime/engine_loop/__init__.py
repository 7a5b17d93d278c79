"""The engine thread: one loop around one engine."""
