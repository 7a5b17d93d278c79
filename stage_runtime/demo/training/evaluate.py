"""Measure both demo models and write `evaluation.json`: `python -m stage_runtime.demo.training.evaluate`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from stage_runtime.demo.training.evaluate_painter import PainterScore, contact_sheet, score_painter
from stage_runtime.demo.training.evaluate_thinker import Score, score_thinker
from stage_runtime.demo.training.train_painter import PAINTER_FOLDER
from stage_runtime.demo.training.train_thinker import THINKER_FOLDER

RESULT_FILE = Path(__file__).parents[1] / "evaluation.json"


def thinker_table(scores: dict[str, Score]) -> Table:
    """Return one row per group of questions."""
    table = Table("thinker", "asked", "exact", "share", title="exact means text and paint tokens both")
    for name, score in scores.items():
        table.add_row(name, str(score.asked), str(score.exact), f"{score.share:.2%}")
    return table


def painter_table(score: PainterScore) -> Table:
    """Return one row per figure."""
    table = Table("painter", "value")
    for name, value in asdict(score).items():
        table.add_row(name.replace("_", " "), f"{value:.4g}")
    return table


def main() -> None:
    """Read the arguments, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--thinker", type=Path, default=THINKER_FOLDER)
    parser.add_argument("--painter", type=Path, default=PAINTER_FOLDER)
    parser.add_argument("--out", type=Path, default=RESULT_FILE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    painter = score_painter(arguments.painter)
    contact_sheet(arguments.painter).quantize(16).save(arguments.painter / "samples.png", optimize=True)
    console = Console()
    console.print(painter_table(painter))
    thinker = score_thinker(arguments.thinker)
    console.print(thinker_table(thinker))
    for name, score in thinker.items():
        for line in score.wrong:
            console.print(f"{name}: {line}", markup=False)
    kept = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    figures = {
        **kept,
        "painter": {name: round(value, 5) for name, value in asdict(painter).items()},
        "thinker": {name: {**asdict(score), "share": round(score.share, 5)} for name, score in thinker.items()},
    }
    arguments.out.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
