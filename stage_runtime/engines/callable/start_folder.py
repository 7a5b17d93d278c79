"""Targets of the torch engine in the folder that ``omni serve`` is started from."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from omni_discovery.errors import ConfigError
from omni_discovery.processes import check_unshared


def add_start_folder(module: str) -> str:
    """Let ``module`` be found in the current folder if it is nowhere else; return why not, or an empty text.

    All other imports look there last. A folder in which other users can write is left out: they could have put
    anything there.
    """
    package = module.partition(".")[0]
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        return ""
    try:
        folder = Path.cwd()
        check_unshared(folder)
    except OSError as error:
        return f"the folder of the start can't be read: {error}"
    except ConfigError as error:
        return f"nothing is imported from the folder {folder}: {error}"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    return ""
