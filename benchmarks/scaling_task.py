"""Jobs for scaling.py and exact_cost.py, on made-up data: a conv net, a transformer, an MLP, GPT-2 small."""

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
        return {"conv": conv_net, "transformer": Transformer, "mlp": mlp, "gpt2": Gpt2}[self.kind]()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=1e-3, momentum=0.9)

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        if self.kind == "mlp":
            return torch.randn(2048, 784, generator=generator), torch.randint(10, (2048,), generator=generator)
        if self.kind == "conv":
            return torch.randn(2048, 3, 32, 32, generator=generator), torch.randint(10, (2048,), generator=generator)
        vocabulary, length = (GPT2_VOCABULARY, 1024) if self.kind == "gpt2" else (VOCABULARY, 64)
        tokens = torch.randint(vocabulary, (2048, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, model, batch):
        x, y = batch
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.kind == "gpt2"):
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


GPT2_VOCABULARY = 50304


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h):
        batch, length, width = h.shape
        parts = self.qkv(self.norms[0](h)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        h = h + self.out(seen)
        return h + self.wide(self.norms[1](h))


class Gpt2(nn.Module):
    """12 layers of width 768, output tied to the embedding: 124 million parameters."""

    def __init__(self, width=768):
        super().__init__()
        self.embed, self.places = nn.Embedding(GPT2_VOCABULARY, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, 12) for _ in range(12)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, GPT2_VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.places(places))))
