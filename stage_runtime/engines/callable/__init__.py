"""engine: torch. Any callable or torch module, with a typed input."""
