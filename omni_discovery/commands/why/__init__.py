"""``omni why``: why a request went where it went, and what it waits for."""
