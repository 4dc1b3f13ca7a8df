"""The same job as a Task: nothing in it knows of precision, compilation or devices."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import instep

sys.path.insert(0, str(Path(__file__).parent))
from common import LR, Gpt2, loss_of, tokens


@dataclass(kw_only=True)
class Job(instep.Task):
    """GPT-2 small on made-up tokens."""

    def model(self):
        return Gpt2()

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=LR)

    def train_data(self):
        return tokens()

    def loss(self, model, batch):
        return loss_of(model, *batch)


if __name__ == "__main__":
    instep.main(Job)
