"""vLLM's own OpenAI server in front of a hub. The only folder of the hub that imports vllm."""
