"""engine: echo. Deterministic, for tests and benchmarks."""
