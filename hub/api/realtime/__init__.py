"""WebSocket /v1/realtime: conversations by voice, in OpenAI's dialect of events."""
