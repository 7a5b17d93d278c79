"""The file at which vLLM's process group meets, also one of a single rank: vLLM leaves it in the temporary folder."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PREFIX: Final = "vllm_dist_"


@contextmanager
def rendezvous_removed() -> Iterator[None]:
    """Remove this process's own when the block is over. Who is killed leaves it: nothing says whose it was."""
    file = _rendezvous_file()
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink()


def _rendezvous_file() -> Path | None:
    """Where this process's default group was made, if that is a file of vLLM's."""
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    file = Path(getattr(store, "path", ""))
    is_vllms = file.name.startswith(_PREFIX) and file.parent == Path(tempfile.gettempdir())
    return file if is_vllms else None
