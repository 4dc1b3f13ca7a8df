"""The same job as a Task."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import instep

sys.path.insert(0, str(Path(__file__).parent))
from common import LR, dataset_of, loss_of, resnet50


@dataclass(kw_only=True)
class Job(instep.Task):
    """ResNet-50 on made-up images."""

    kind: str = "batches"

    def model(self):
        return resnet50()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=LR, momentum=0.9)

    def train_data(self):
        return dataset_of(self.kind)

    def loss(self, model, batch):
        return loss_of(model, *batch)


if __name__ == "__main__":
    instep.main(Job)
