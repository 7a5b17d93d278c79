"""Requests: the orchestrator, stage pools and the OpenAI-compatible HTTP API."""
