"""SharedMemoryConnector: hand-offs within one host."""
