"""Calls of functions in the answers of a vLLM stage."""
