"""Handwritten digits with instep.

instep train trainer_after.py --epochs 3 --batch-size 64 --clip-norm 1.0 --lr-schedule linear
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

import instep


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, pixels, labels=None):
        logits = self.layers(pixels)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Digits(Dataset):
    def __init__(self, start, end):
        images, labels = load_digits(return_X_y=True)
        self.pixels = torch.tensor(images[start:end], dtype=torch.float32) / 16
        self.labels = torch.tensor(labels[start:end])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixels": self.pixels[index], "labels": self.labels[index]}


@dataclass(kw_only=True)
class ClassifyDigits(instep.Task):
    learning_rate: float = 0.1
    hidden: int = 32

    def model(self):
        torch.manual_seed(0)  # only to start from the same weights as before; --seed does it otherwise
        return Net(self.hidden)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.learning_rate)

    def train_data(self):
        return Digits(0, 1400)

    def eval_data(self):
        return Digits(1400, 1797)

    def loss(self, model, batch):
        return model(**batch)["loss"]

    def metrics(self, model, batch):
        logits = model(**batch)["logits"]
        return {"accuracy": (logits.argmax(1) == batch["labels"]).float()}


if __name__ == "__main__":
    instep.main(ClassifyDigits)
