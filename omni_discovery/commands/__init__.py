"""The omni command and its sub-commands."""
