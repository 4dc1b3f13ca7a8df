"""A small transformer that learns to write text, character by character.

    python examples/charlm.py                                           one process
    instep train examples/charlm.py -n 2 --epochs 10                    two processes, the same result
    instep train examples/charlm.py text=FILE width=128 --clip-norm 1   on your own text

Without `text` it learns from a text that comes with Python: the source of the `argparse` module.
"""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import instep


class Block(nn.Module):
    """Causal attention, then a small MLP."""

    def __init__(self, width, num_heads, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        # Dropout modules, and no dropout inside the attention: the noise of a module does not depend on the number
        # of processes, but that of a fused attention would.
        self.dropout_1, self.dropout_2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout_1(self.out(self.attend(self.norm_1(x))))
        return x + self.dropout_2(self.mlp(self.norm_2(x)))

    def attend(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        values = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return values.transpose(1, 2).reshape(rows, length, width)


class Transformer(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, num_characters, length, width, num_layers, num_heads, dropout):
        super().__init__()
        self.embed = nn.Embedding(num_characters, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_characters)

    def forward(self, x):
        x = self.dropout(self.embed(x) + self.positions)
        return self.head(self.norm(self.blocks(x)))


@dataclass(kw_only=True)
class CharLM(instep.Task):
    """A character-level language model."""

    text: str | None = None
    length: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    dropout: float = 0.1
    lr: float = 3e-3
    weight_decay: float = 0.1
    warmup: float = 0.1

    def data(self, split):
        return instep.data.text(self.text or argparse.__file__, self.length, split)

    def train_data(self):
        return self.data("train")

    def eval_data(self):
        return self.data("test")

    def model(self):
        self.vocabulary = self.data("train").vocabulary
        return Transformer(len(self.vocabulary), self.length, self.width, self.layers, self.heads, self.dropout)

    def optimizer(self, params):
        """Return AdamW with weight decay for the weight matrices only, not for norms, biases or embeddings."""
        decayed = [p for name, p in params.named if p.dim() > 1 and name.startswith(("blocks", "head"))]
        chosen = set(map(id, decayed))
        rest = [p for p in params if id(p) not in chosen]
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)

    def scheduler(self, optimizer, num_steps):
        """Return a schedule with linear warmup and cosine decay."""
        num_warmup = max(1, int(self.warmup * num_steps))

        def factor(step):
            if step < num_warmup:
                return (step + 1) / num_warmup
            return 0.5 * (1 + math.cos(math.pi * (step - num_warmup) / max(1, num_steps - num_warmup)))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def token_losses(self, model, batch):
        """Return the loss at every position, and a mask: a space after a space does not count."""
        x, y = batch
        space = self.vocabulary.find(" ")
        counts = ~((x == space) & (y == space))
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        return losses, counts.flatten()

    def loss(self, model, batch):
        """Return the mean over the characters that count, and their number, which differs between batches."""
        losses, counts = self.token_losses(model, batch)
        weight = counts.sum()
        return (losses * counts).sum() / weight, weight

    def metrics(self, model, batch):
        losses, counts = self.token_losses(model, batch)
        return {"bits_per_character": (losses / math.log(2), counts)}


if __name__ == "__main__":
    instep.main(CharLM)
