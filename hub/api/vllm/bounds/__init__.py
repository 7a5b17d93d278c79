"""What one request to vLLM's server may cost a hub."""
