"""What vLLM-Omni says of three models; `.venv-omni/bin/python -m tests.support.resolved_pipelines` writes it.

The files in ``tests/support/resolved`` are for tests without vLLM-Omni; a contract test holds them against the
installed one. A model is a folder with nothing but a ``config.json``: the resolver reads no more.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from omni_discovery.deploy.resolution import ResolveRequest
from stage_runtime.engines.vllm_omni.pipeline import ResolvedPipeline

FOLDER: Final = Path(__file__).parent / "resolved"
#: Stands in the files for the model's folder.
MODEL: Final = "/models/tiny"
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_tts": {"model_type": "qwen3_tts", "architectures": ["Qwen3TTSForConditionalGeneration"]},
    "qwen2_5_omni": {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"]},
    "qwen3_omni_moe": {"model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"]},
}


def write_config(folder: Path, name: str) -> Path:
    """Make a model's folder below ``folder``, with its ``config.json`` alone; return it."""
    made = folder / name
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    return made


def resolve_now(name: str, folder: Path, **request: Any) -> ResolvedPipeline:
    """What the installed vLLM-Omni says of a model, as if its folder were ``MODEL``."""
    from stage_runtime.engines.vllm_omni.resolver import resolve

    model = folder / name if (folder / name).exists() else write_config(folder, name)
    said = msgspec.json.encode(resolve(ResolveRequest(model=str(model), **request)))
    return msgspec.json.decode(said.replace(str(model).encode(), MODEL.encode()), type=ResolvedPipeline)


def recorded(name: str) -> ResolvedPipeline:
    """What the file says."""
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=ResolvedPipeline)


def main() -> int:
    """Write all files; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        for name in CONFIGS:
            made = msgspec.json.format(msgspec.json.encode(resolve_now(name, Path(folder))), indent=1)
            (FOLDER / f"{name}.json").write_bytes(made + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
