"""One replica process: its start, readiness check, published state, graceful shutdown."""
