"""POST /v1/chat/completions: messages in, choices with text, pictures and sound out."""
