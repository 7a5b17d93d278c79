"""The threads that check and compile forms of answers."""

from __future__ import annotations

import os
from typing import Any

from stage_runtime.engines.client_threads import ClientThreads


def put_forms_behind_engine(llm: Any) -> ClientThreads:
    """The threads for forms of answers, in which vLLM compiles them from now on."""
    threads = ClientThreads(max(2, (os.cpu_count() or 1) // 2), "omni-forms")
    core = getattr(getattr(llm, "engine_core", None), "engine_core", None)
    manager: Any = getattr(core, "structured_output_manager", None)
    if getattr(manager, "executor", None) is not None:
        manager.executor.shutdown(wait=False)
        manager.executor = threads
    return threads
