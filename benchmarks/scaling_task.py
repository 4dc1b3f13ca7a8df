"""Jobs for scaling.py and exact_cost.py, on made-up data: a conv net, a small transformer, a smaller MLP."""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import instep


@dataclass(kw_only=True)
class Scaling(instep.Task):
    kind: str = "conv"

    def model(self):
        return {"conv": conv_net, "transformer": Transformer, "mlp": mlp}[self.kind]()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=1e-3, momentum=0.9)

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        if self.kind == "mlp":
            return torch.randn(2048, 784, generator=generator), torch.randint(10, (2048,), generator=generator)
        if self.kind == "conv":
            return torch.randn(2048, 3, 32, 32, generator=generator), torch.randint(10, (2048,), generator=generator)
        tokens = torch.randint(VOCABULARY, (2048, 65), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def conv_net():
    """3.7 million parameters: 15 MB of gradients."""
    widths = (3, 64, 128, 256, 512)
    layers = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10))


def mlp():
    """The MNIST job's."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


VOCABULARY = 2000


class Transformer(nn.Module):
    """4 layers of width 384: 8.6 million parameters, 35 MB of gradients."""

    def __init__(self, width=384):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))
