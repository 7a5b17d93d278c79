"""One request's state machine. Pure; only machine.py writes a phase."""
