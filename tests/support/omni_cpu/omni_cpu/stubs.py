"""Makes torchvision and torchaudio of the default index importable beside torch for CPUs.

Those wheels are built for CUDA, and their compiled extensions don't load here. vLLM-Omni imports both, whatever the
model; nothing that the tests run calls into the extensions. Importing this module costs next to nothing: the stand-ins
are made when one of the two is imported.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

#: Keeps the operators defined.
_kept: list[Any] = []


class _BeforeTheirImport:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Install the stand-ins before the first of the two is imported; finds nothing itself."""
        del path, target
        if name in ("torchvision", "torchaudio") and not _kept:
            _kept.append(None)
            _define_operators()
            sys.modules["torchaudio._extension"] = _extension()
        return None


def _define_operators() -> None:
    """The operators that torchvision registers shape functions for as it is imported."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _extension() -> types.ModuleType:
    module: Any = types.ModuleType("torchaudio._extension")
    module._IS_TORCHAUDIO_EXT_AVAILABLE = module._IS_ALIGN_AVAILABLE = False
    module._check_cuda_version = lambda: None
    module.fail_if_no_align = lambda function: function
    return module  # type: ignore[no-any-return]


sys.meta_path.insert(0, _BeforeTheirImport())
