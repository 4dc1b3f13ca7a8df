"""Train on Parquet files: each row group is read once an epoch, whatever the number of processes.

    python examples/recipes/parquet.py                                  writes the digits to files, then trains on them
    instep train examples/recipes/parquet.py -n 2 folder=s3://bucket/digits

The scaler is fitted once, over all ranks, and is part of every checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import nn

import instep


@dataclass(kw_only=True)
class Digits(instep.Task):
    """Handwritten digits from Parquet files."""

    folder: str = "digits-parquet"
    lr: float = 3e-3

    def preprocess(self):
        return {"scaler": instep.data.StandardScaler().fit(self.read("train"), column="pixels")}

    def model(self):
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=self.lr)

    def train_data(self):
        return self.read("train")

    def eval_data(self):
        return self.read("test")

    def loss(self, model, batch):
        return F.cross_entropy(model(self.scaled(batch)), batch["label"])

    def metrics(self, model, batch):
        return {"accuracy": (model(self.scaled(batch)).argmax(1) == batch["label"]).float()}

    def read(self, split):
        return instep.data.parquet(f"{self.folder}/{split}")

    def scaled(self, batch):
        return self.fitted["scaler"].transform(batch["pixels"]).float()


def write(folder, split, num_files=4):
    """Write a split of the digits to several files, in row groups of 64."""
    digits = instep.data.digits(split)
    folder = Path(folder) / split
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        pixels, labels = digits.gather(torch.arange(number, len(digits), num_files))
        rows = pa.FixedSizeListArray.from_arrays(pa.array(pixels.numpy().reshape(-1)), 64)
        table = pa.table({"pixels": rows, "label": labels.numpy()})
        pq.write_table(table, folder / f"{number:03}.parquet", row_group_size=64)


if __name__ == "__main__":
    if not Path(Digits.folder).exists():
        for split in ("train", "test"):
            write(Digits.folder, split)
    instep.main(Digits)
