"""vLLM-Omni on a CPU, for tests: a platform, workers, and stand-ins for two libraries' CUDA extensions."""


def platform() -> str:
    """The platform's class, by name; vLLM-Omni asks for it through an entry point."""
    return "omni_cpu.platform.CpuOmniPlatform"
