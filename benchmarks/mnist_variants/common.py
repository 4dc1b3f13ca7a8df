"""What the two baselines share: the files, the accuracy, and how a steady step is timed. No instep here."""

import gzip
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch


def read(root, split):
    """Return the images (bytes, N x 784) and labels (int64) of one half."""
    prefix = "train" if split == "train" else "t10k"
    return (
        torch.from_numpy(_bytes(Path(root) / f"{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 784)),
        torch.from_numpy(_bytes(Path(root) / f"{prefix}-labels-idx1-ubyte.gz", 8).astype(np.int64)),
    )


def _bytes(path, header):
    with gzip.open(path) as file:
        return np.frombuffer(bytearray(file.read()), dtype=np.uint8, offset=header)


def mean_and_quartile(ends):
    """From the ends of an epoch's steps: the mean ms a step, and the lower quartile of single steps.

    A neighbour on the machine only ever adds time, so the quartile is what an undisturbed step takes.
    """
    steps = sorted(1000 * (b - a) for a, b in itertools.pairwise(ends))
    return sum(steps) / len(steps), steps[len(steps) // 4]


class Stopwatch:
    """Notes when steps end, epoch by epoch; instep's log has the same.

    What lies between two epochs, an evaluation or a new iterator, counts for nobody.
    """

    def __init__(self):
        self.ends = []
        self._ends = []

    def step(self):
        """Note the end of a step."""
        self._ends.append(time.time())

    def epoch(self):
        """Note the end of an epoch."""
        self.ends.append(self._ends)
        self._ends = []


def report(model, root, watch):
    """Print what the benchmark reads: when each epoch's steps ended, and the test accuracy."""
    x, y = read(root, "test")
    with torch.no_grad():
        accuracy = (model(x.float().div(255)).argmax(1) == y).float().mean().item()
    print(json.dumps({"ends": watch.ends, "accuracy": accuracy}))
