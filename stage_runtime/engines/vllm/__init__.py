"""engine: vllm. The only folder of the runtime that imports vllm."""
