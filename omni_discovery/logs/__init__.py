"""Log lines: their text, their JSON, and when readiness is told."""
