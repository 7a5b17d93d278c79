"""What `omni serve` takes from commands and deploy files of vLLM-Omni."""
