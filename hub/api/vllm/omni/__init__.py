"""vLLM-Omni's own OpenAI server in front of a hub."""
