"""Handwritten digits of 8×8 pixels, shipped with the package (files/digits.md names their source)."""

from pathlib import Path

import numpy as np
import torch

from instep.data.columns import Columns
from instep.data.dataset import Split, check_split

_FILE = Path(__file__).parent.parent / "files" / "digits.npz"
_TEST_EVERY = 5  # neighbours in the file are by the same writer, so each writer is in both splits


def digits(split: Split = "train") -> Columns:
    """Load the digits: 1437 to train on, 360 to test on.

    A batch is `(x, y)`: x float32 (B, 64), the pixels row by row, in 0..1; y int64 (B,), the digit.
    """
    check_split(split)
    with np.load(_FILE, allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    chosen = (np.arange(len(labels)) % _TEST_EVERY == 0) == (split == "test")
    x = torch.from_numpy(images[chosen].astype(np.float32) / 16)
    return Columns((x, torch.from_numpy(labels[chosen].astype(np.int64))))
