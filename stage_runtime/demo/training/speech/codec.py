"""The codebook: 512 kinds of frames, found by k-means in the speech of the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from sklearn.cluster import KMeans
from torch import Tensor

from stage_runtime.demo.training.speech.corpus import Spoken

CODES: Final = 512
#: Beside the vocoder, which is trained for it; the talker learns the same codes.
CODEBOOK: Final = Path(__file__).parents[2] / "vocoder" / "codebook.safetensors"
_SEED: Final = 41


def make_codebook(corpus: list[Spoken], file: Path) -> None:
    """Find the centres of groups of alike frames, and keep them."""
    described = torch.cat([each.described for each in corpus])
    groups = KMeans(CODES, random_state=_SEED, n_init=1, max_iter=30).fit(described.double().numpy())
    centres = torch.from_numpy(groups.cluster_centers_).float()
    apart = (described - centres[torch.from_numpy(groups.labels_).long()]).square().sum(1).mean()
    spread = (described - described.mean(0)).square().sum(1).mean()
    print(f"{len(described)} frames, {CODES} codes; variance left by the codes: {apart / spread:.4f}", flush=True)
    save_file({"codebook": centres}, file)


def encode_corpus(corpus: list[Spoken], file: Path) -> list[Tensor]:
    """The codes of each sentence."""
    centres = load_file(file)["codebook"]
    return [torch.cdist(each.described, centres).argmin(1) for each in corpus]
