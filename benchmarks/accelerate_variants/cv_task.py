"""The same classifier of pictures as a Task: instep train cv_task.py -n 2 --batch-size 32"""

from dataclasses import dataclass

import torch
from common import Digits, conv_net
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

import instep


@dataclass(kw_only=True)
class Pictures(instep.Task):
    """Handwritten digits, shifted."""

    lr: float = 1e-2

    def model(self):
        return conv_net()

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=self.lr / 25)

    def scheduler(self, optimizer, num_steps):
        return OneCycleLR(optimizer, max_lr=self.lr, total_steps=num_steps)

    def train_data(self):
        return Digits("train")

    def eval_data(self):
        return Digits("test")

    def loss(self, model, batch):
        return cross_entropy(model(batch["image"]), batch["label"])

    def metrics(self, model, batch):
        return {"accuracy": model(batch["image"]).argmax(-1) == batch["label"]}
