"""What the two baselines share: the files, the accuracy, and how a steady step is timed. No instep here."""

import gzip
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


class Stopwatch:
    """Times the steps of an epoch from the end of its first one to the end of its last one.

    So an evaluation or a new iterator between two epochs counts for nobody; instep's log gives the same.
    """

    def __init__(self):
        self.ms_per_step = []
        self._ends = []

    def step(self):
        """Note the end of a step."""
        self._ends.append(time.perf_counter())

    def epoch(self):
        """Note the end of an epoch."""
        ends, self._ends = self._ends, []
        self.ms_per_step.append(1000 * (ends[-1] - ends[0]) / (len(ends) - 1))


def report(model, root, watch):
    """Print what the benchmark reads: ms a step of each epoch, and the test accuracy."""
    x, y = read(root, "test")
    with torch.no_grad():
        accuracy = (model(x.float().div(255)).argmax(1) == y).float().mean().item()
    print(json.dumps({"ms_per_step": watch.ms_per_step, "accuracy": accuracy}))
