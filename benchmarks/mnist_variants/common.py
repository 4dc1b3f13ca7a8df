"""What the two baselines share: the files, the accuracy, and how a steady step is timed. No instep here."""

import gzip
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch


def read(root, split):
    """Give the images (bytes, N x 784) and labels (int64) of one half."""
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
    """Times the steps of an epoch from the end of its first one to the end of its last one.

    So an evaluation or a new iterator between two epochs counts for nobody; instep's log gives the same.
    """

    def __init__(self):
        self.ms_per_step = []
        self.undisturbed_ms = []
        self._ends = []

    def step(self):
        """Note the end of a step."""
        self._ends.append(time.perf_counter())

    def epoch(self):
        """Note the end of an epoch."""
        ends, self._ends = self._ends, []
        mean, quartile = mean_and_quartile(ends)
        self.ms_per_step.append(mean)
        self.undisturbed_ms.append(quartile)


def report(model, root, watch):
    """Print what the benchmark reads: ms a step of each epoch, and the test accuracy."""
    x, y = read(root, "test")
    with torch.no_grad():
        accuracy = (model(x.float().div(255)).argmax(1) == y).float().mean().item()
    found = {"ms_per_step": watch.ms_per_step, "undisturbed_ms": watch.undisturbed_ms, "accuracy": accuracy}
    print(json.dumps(found))
