"""An image classifier as a Task."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import instep

sys.path.insert(0, str(Path(__file__).parent))
from images import LR, Images, resnet50


@dataclass(kw_only=True)
class Classify(instep.Task):
    """Which class is it?"""

    lr: float = LR

    def model(self):
        return resnet50()

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=self.lr / 25)

    def scheduler(self, optimizer, num_steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=num_steps + 1)

    def train_data(self):
        return Images("train")

    def eval_data(self):
        return Images("test")

    def loss(self, model, batch):
        return F.cross_entropy(model((batch["image"] - 0.45) / 0.225), batch["label"])

    def metrics(self, model, batch):
        return {"accuracy": (model((batch["image"] - 0.45) / 0.225).argmax(1) == batch["label"]).float()}


if __name__ == "__main__":
    instep.main(Classify)
