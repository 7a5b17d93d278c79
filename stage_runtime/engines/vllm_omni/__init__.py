"""engine: vllm-omni. The only folder of the runtime that imports vllm_omni."""
