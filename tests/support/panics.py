"""Panics as llguidance raises them, of Rust: no Exception, and of a class that can't be imported."""

from __future__ import annotations

_PanicException: type[BaseException] = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


def panic(said: str) -> BaseException:
    """One to raise."""
    return _PanicException(said)
