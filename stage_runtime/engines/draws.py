"""Gives back a draw that was for nothing, on a CPU.

vLLM draws a token behind each part of a prompt that does not fit into one step, and then sets the generator of a
request with a seed back by its offset. Generators of a CPU have no offset: the step fails, with every request in it.
"""

from __future__ import annotations

from typing import Any, Final

#: The methods of vLLM's runner that draw, and that set generators back.
_SAMPLE: Final = "_sample"
_KEEP_BOOKS: Final = "_bookkeeping_sync"


class _Draws:
    """The generator of one request as vLLM sets it back, and its state before the last draw."""

    def __init__(self, generator: Any) -> None:
        self._generator, self._before = generator, generator.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Set it back by one draw, which is all that vLLM does with it."""
        del offset
        self._generator.set_state(self._before)


def give_draws_back(llm: Any) -> None:
    """See the module; does nothing where generators have an offset, and where the model runs in another process."""
    core = getattr(llm.engine_core, "engine_core", None)
    worker = getattr(getattr(getattr(core, "model_executor", None), "driver_worker", None), "worker", None)
    give_draws_of_runner_back(getattr(worker, "model_runner", None))


def give_draws_of_runner_back(runner: Any) -> None:
    """See the module; for the object that runs the model."""
    is_on_cpu = getattr(getattr(runner, "device", None), "type", "") == "cpu"
    sample, keep_books = getattr(runner, _SAMPLE, None), getattr(runner, _KEEP_BOOKS, None)
    if not is_on_cpu or sample is None or keep_books is None:
        return
    draws: dict[int, _Draws] = {}

    def draw(*args: Any, **kwargs: Any) -> Any:
        draws.clear()
        draws.update((row, _Draws(generator)) for row, generator in runner.input_batch.generators.items())
        return sample(*args, **kwargs)

    def keep_books_with_draws(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        generators, batch.generators = batch.generators, draws
        try:
            return keep_books(*args, **kwargs)
        finally:
            batch.generators = generators

    setattr(runner, _SAMPLE, draw)
    setattr(runner, _KEEP_BOOKS, keep_books_with_draws)
