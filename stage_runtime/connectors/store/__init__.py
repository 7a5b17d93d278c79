"""The in-process and shared-memory stores that connectors are built on."""
