"""What the baselines and peers share: data, model, accuracy, and how a steady step is timed. No instep here."""

import gzip
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH_PER_PROCESS = 64


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


class Images(Dataset):
    """One sample at a time, as people write it."""

    def __init__(self, root):
        self.images, self.labels = read(root, "train")

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i].float().div(255), self.labels[i]


class WholeBatches(Images):
    """A whole batch at a time: what a DataLoader can do best with data in memory."""

    def __getitems__(self, indices):
        indices = torch.tensor(indices)
        return self.images.index_select(0, indices).float().div_(255), self.labels.index_select(0, indices)


def data_loader(root, tuned):
    """Return the loader that a peer distributes: as documented, or tuned as far as it can be."""
    if not tuned:
        return DataLoader(Images(root), batch_size=BATCH_PER_PROCESS, shuffle=True)
    return DataLoader(WholeBatches(root), batch_size=BATCH_PER_PROCESS, shuffle=True, collate_fn=_as_it_is)


def _as_it_is(batch):
    return batch


def network():
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def make_optimizer(params, tuned):
    """Return the optimizer of all ways; the tuned ones have torch's fused kernel."""
    return torch.optim.Adam(params, lr=1e-3, fused=tuned or None)


def prepare_process(tuned):
    """Set what every way sets: one thread; the tuned ones also flush denormals."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(tuned)
    torch.manual_seed(0)


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
    print(json.dumps({"ends": watch.ends, "accuracy": accuracy_of(model, root)}))


def accuracy_of(model, root):
    x, y = read(root, "test")
    with torch.no_grad():
        return (model(x.float().div(255)).argmax(1) == y).float().mean().item()
