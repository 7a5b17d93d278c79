"""Text of a thinker by this project beside vLLM-Omni's own AsyncOmni and orchestrator: the same tiny Qwen2.5-Omni.

On CPUs, in one run: both are up at once, with all three stages, and take turns; the ratios are the result. Only
text is asked for, so talker and decoder stand by. Needs the environments that `make setup-test` and `make setup-omni`
make.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.bench.omni_peer import OMNI_PYTHON, Comparison
from tests.bench.report import Row, percentile

CLIENT: Final = "tests.bench.text_client"
_STAGE: Final = {"enforce_eager": True, "kv_cache_memory_bytes": 32 << 20, "dtype": "float32"}
_WRITES: Final = {**_STAGE, "max_num_seqs": 4, "max_model_len": 2048, "max_num_batched_tokens": 2048}
_DECODES: Final = {**_STAGE, "max_num_seqs": 1, "max_model_len": 8192, "max_num_batched_tokens": 8192}
_SIZES: Final = (_WRITES, _WRITES, _DECODES)


def our_document(model: Path, thinkers: int) -> Row:
    """The deploy document of this project's pipeline."""
    stages = [
        {
            "stage_id": stage_id,
            "engine": "vllm-omni",
            "model": str(model),
            "engine_args": {**sizes, "async_chunk": False},
            "runtime": {
                "devices": "cpu",
                "python": str(OMNI_PYTHON),
                "num_replicas": thinkers if stage_id == 0 else 1,
            },
            "final_output": ("text", "none", "audio")[stage_id],
        }
        for stage_id, sizes in enumerate(_SIZES)
    ]
    return {"model": "tiny-omni", "stages": stages}


def peer_document(thinkers: int) -> Row:
    """vLLM-Omni's own deploy file for the model, with the same sizes."""
    first = {"num_replicas": thinkers, "devices": ",".join(map(str, range(thinkers)))}
    stages = [
        {
            **sizes,
            "stage_id": stage_id,
            "async_scheduling": False,
            **(first if stage_id == 0 else {"devices": str(thinkers + stage_id - 1)}),
        }
        for stage_id, sizes in enumerate(_SIZES)
    ]
    return {"model_runner": "v1", "async_chunk": False, "stages": stages}


def summary(rows: Sequence[Row]) -> Row:
    """What clients saw, and the processor time of the process that routes."""
    answers = sum(len(row["whole_s"]) for row in rows)
    return {
        "first_ms": round(1000 * percentile([each for row in rows for each in row["first_s"]], 0.5), 1),
        "whole_ms": round(1000 * percentile([each for row in rows for each in row["whole_s"]], 0.5), 1),
        "answers_per_s": round(statistics.median(len(row["whole_s"]) / row["wall_s"] for row in rows), 3),
        "head_ms_per_answer": round(1000 * sum(row["head_cpu_s"] for row in rows) / max(1, answers), 1),
        "errors": sum(len(row["errors"]) for row in rows),
    }


def main() -> None:
    """Measure, print and write."""
    text = Comparison(
        title="text",
        replicas="thinkers",
        writer=("tests.support.tiny_qwen_omni", "qwen2_5_omni"),
        model="tiny-omni",
        client=CLIENT,
        our_document=our_document,
        peer_document=peer_document,
        summary=summary,
    )
    text.run(text.parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
