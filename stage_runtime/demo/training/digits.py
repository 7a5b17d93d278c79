"""The real handwritten digits bundled with scikit-learn, split once and for all, and the judge of drawn ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.svm import SVC

SPLIT_SEED = 1797
TRAINING_COUNT = 1200
#: The darkest grey level in the set; images are scaled to 0.0 paper .. 1.0 ink.
DARKEST = 16.0

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RealDigits:
    """Training and test images, shape (count, 8, 8), with their labels."""

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels


def load_real_digits() -> RealDigits:
    """Return all 1797 digits: 1200 to train with, 597 never trained with."""
    bunch = load_digits()
    images = (bunch.images / DARKEST).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    train, test = order[:TRAINING_COUNT], order[TRAINING_COUNT:]
    return RealDigits(images[train], labels[train], images[test], labels[test])


def train_reader(digits: RealDigits) -> SVC:
    """Return a classifier trained on the real training digits alone; feed it rows of 64 values in 0..1."""
    return SVC(C=10.0, gamma=0.25, random_state=0).fit(_rows(digits.train_images), digits.train_labels)


def read(reader: SVC, images: Images) -> Labels:
    """Return the digit that the classifier sees in each 8x8 image."""
    seen: Labels = np.asarray(reader.predict(_rows(images)), dtype=np.int64)
    return seen


def nearest_distances(images: Images, others: Images) -> NDArray[np.float32]:
    """Return for each image the L2 distance to the nearest of the others."""
    nearest: NDArray[np.float32] = _distances(images, others).min(axis=1)
    return nearest


def class_distances(images: Images, labels: Labels) -> NDArray[np.float32]:
    """Return the L2 distances of all pairs of different images of one class, over all classes."""
    found = []
    for digit in range(10):
        of_class = images[labels == digit]
        upper = np.triu_indices(len(of_class), k=1)
        found.append(_distances(of_class, of_class)[upper])
    return np.concatenate(found)


def _rows(images: Images) -> Images:
    return images.reshape(len(images), -1)


def _distances(images: Images, others: Images) -> NDArray[np.float32]:
    left, right = _rows(images), _rows(others)
    squared = (left**2).sum(1)[:, None] + (right**2).sum(1)[None, :] - 2 * left @ right.T
    distances: NDArray[np.float32] = np.sqrt(np.maximum(squared, 0)).astype(np.float32)
    return distances
