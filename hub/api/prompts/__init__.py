"""POST /v1/completions: prompts in, text out."""
