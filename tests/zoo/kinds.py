"""Kinds of models, optimizers, schedulers, losses and datasets that people train with, each as a small Task.

Everything is in float64: what differs by more than rounding is then plain to see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import instep
from zoo.pieces import (
    CLASSES,
    NUM_EVAL,
    NUM_TRAIN,
    By,
    Complex,
    Items,
    Noisy,
    Partial,
    SizedStream,
    Stateful,
    Stream,
    Tied,
    Vae,
    around,
    contrast,
    first,
    image,
    made_up,
    masked,
    mlp,
    one_hot,
    padded,
    penalty,
    script,
    sequence,
    time_first,
    tokens,
    two_groups,
)


@dataclass(frozen=True)
class Kind:
    """One kind of thing, and what is promised of it."""

    group: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    """Of its Task."""
    refused: str = ""
    """What the sentence says with which it is refused before the first step."""
    only: str = ""
    """The mode ("exact", "normal") for which that holds; empty: both."""
    named: str = ""
    """Without exact mode it depends on the split, and a notice says so."""


@dataclass(kw_only=True)
class Zoo(instep.Task):
    """A Task that is put together from parts."""

    net: Callable[[], nn.Module] | None = None
    opt: Callable[[Any], Any] | None = None
    plan: Callable[[Any, int], Any] | None = None
    criterion: Callable[[Any, Any, Any], Any] | None = None
    data: Callable[[tuple[torch.Tensor, torch.Tensor]], Any] | None = None
    gather: Callable[[list[Any]], Any] | None = None
    rules: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.collate = self.gather

    def model(self) -> nn.Module:
        return (self.net or mlp)().double()

    def optimizer(self, params: Any) -> Any:
        return (self.opt or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)))(params)

    def scheduler(self, optimizer: Any, num_steps: int) -> Any:
        return None if self.plan is None else self.plan(optimizer, num_steps)

    def train_data(self) -> Any:
        return (self.data or (lambda columns: columns))(made_up(NUM_TRAIN, 1))

    def eval_data(self) -> Any:
        return (self.data or (lambda columns: columns))(made_up(NUM_EVAL, 2))

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return (self.criterion or (lambda model, x, y: F.cross_entropy(model(x), y)))(model, x, y)

    def metrics(self, model: Any, batch: Any) -> Any:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        out = model(x)
        return {"accuracy": out.argmax(1) == y, "weighted": (out.abs().amax(1), (y + 1).double())}

    def sync_buffers(self) -> dict[str, str]:
        return self.rules


def _models() -> dict[str, Any]:
    encoder = nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True)
    return {
        "linear": around(nn.Identity()),
        "deep, ReLU, GELU, SiLU": around(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.GELU(), nn.SiLU()),
        "PReLU, GLU, Softplus": around(nn.Linear(12, 24), nn.GLU(), nn.PReLU(), nn.Softplus()),
        "Conv1d": around(sequence(), nn.Conv1d(3, 3, 3, padding=1)),
        "Conv2d with pooling": around(image(), nn.Conv2d(3, 6, 1), nn.AvgPool2d((2, 1)), width=12),
        "ConvTranspose2d": around(image(), nn.ConvTranspose2d(3, 3, 1)),
        "BatchNorm1d": around(nn.Linear(12, 12), nn.BatchNorm1d(12)),
        "BatchNorm2d after a convolution with bias": around(image(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()),
        "BatchNorm without running statistics": around(
            nn.Linear(12, 12), nn.BatchNorm1d(12, track_running_stats=False)
        ),
        "SyncBatchNorm": around(nn.Linear(12, 12), nn.SyncBatchNorm(12)),
        "LayerNorm": around(nn.Linear(12, 12), nn.LayerNorm(12)),
        "GroupNorm": around(nn.Linear(12, 12), nn.GroupNorm(3, 12)),
        "RMSNorm": around(nn.Linear(12, 12), nn.RMSNorm(12)),
        "InstanceNorm": around(image(), nn.InstanceNorm2d(3, affine=True)),
        "InstanceNorm with running statistics": around(image(), nn.InstanceNorm2d(3, track_running_stats=True)),
        "LocalResponseNorm": around(image(), nn.LocalResponseNorm(2)),
        "weight_norm": around(nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))),
        "spectral_norm": around(nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12))),
        "orthogonal": around(nn.utils.parametrizations.orthogonal(nn.Linear(12, 12))),
        "LSTM": around(sequence(), By(first, nn.LSTM(4, 4, batch_first=True))),
        "GRU, two layers, both ways": around(
            sequence(), By(first, nn.GRU(4, 4, 2, batch_first=True, bidirectional=True)), width=24
        ),
        "RNN, time first": around(sequence(), By(time_first, nn.RNN(4, 4))),
        "transformer with dropout": around(sequence(), encoder),
        "MultiheadAttention with dropout": around(
            sequence(), By(lambda x, layer: layer(x, x, x)[0], nn.MultiheadAttention(4, 2, 0.2, batch_first=True))
        ),
        "Embedding": around(By(tokens, nn.Embedding(9, 3)), width=36),
        "Embedding, sparse": around(By(tokens, nn.Embedding(9, 3, sparse=True)), width=36),
        "EmbeddingBag": around(By(tokens, nn.EmbeddingBag(9, 12))),
        "Bilinear": around(By(lambda x, layer: layer(x, x), nn.Bilinear(12, 12, 12))),
        "Dropout": around(nn.Linear(12, 12), nn.Dropout(0.3)),
        "Dropout2d": around(image(), nn.Dropout2d(0.3)),
        "FractionalMaxPool2d": around(image(), nn.FractionalMaxPool2d(1, output_size=(1, 2)), width=6),
        "F.dropout": around(nn.Linear(12, 12), By(lambda x: F.dropout(x, 0.3))),
        "VAE (randn_like)": around(Vae()),
        "Gumbel softmax": around(nn.Linear(12, 12), By(lambda x: F.gumbel_softmax(x))),
        "torch.distributions": around(By(lambda x: torch.distributions.Normal(x, 0.1 + x.abs()).rsample())),
        "noise by an own function": around(By(lambda x: x + 0.1 * instep.randn_like(x))),
        "mixture of experts": around(
            By(
                lambda x, gate, *experts: sum(
                    w[:, None] * e(x) for w, e in zip(gate(x).softmax(1).T, experts, strict=True)
                ),
                nn.Linear(12, 2),
                nn.Linear(12, 12),
                nn.Linear(12, 12),
            )
        ),
        "checkpointed by torch, with dropout": around(
            By(
                lambda x, layer: checkpoint(layer, x, use_reentrant=False),
                nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.3)),
            )
        ),
        "tied weights": around(Tied()),
        "frozen and unused layers": around(Partial()),
        "a residual network": around(By(lambda x, layer: x + layer(x).tanh(), nn.Linear(12, 12))),
        "a momentum encoder's buffer": around(Stateful("momentum")),
    }


def _optimizers() -> dict[str, Any]:
    o = torch.optim
    return {
        "SGD": lambda p: o.SGD(p, lr=0.1),
        "SGD, Nesterov, weight decay": lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "Adam": lambda p: o.Adam(p),
        "AdamW, amsgrad": lambda p: o.AdamW(p, amsgrad=True),
        "Adagrad": lambda p: o.Adagrad(p),
        "Adadelta": lambda p: o.Adadelta(p),
        "Adamax": lambda p: o.Adamax(p),
        "NAdam": lambda p: o.NAdam(p),
        "RAdam": lambda p: o.RAdam(p),
        "RMSprop": lambda p: o.RMSprop(p, momentum=0.5, centered=True),
        "ASGD": lambda p: o.ASGD(p),
        "Adafactor": lambda p: o.Adafactor(p),
        "two groups": two_groups,
        "Langevin dynamics": lambda p: Noisy(p, lr=0.1),
    }


def _schedulers() -> dict[str, Any]:
    s = schedulers
    return {
        "StepLR": lambda o, n: s.StepLR(o, 2),
        "MultiStepLR": lambda o, n: s.MultiStepLR(o, [1, 3]),
        "ExponentialLR": lambda o, n: s.ExponentialLR(o, 0.9),
        "CosineAnnealingLR": lambda o, n: s.CosineAnnealingLR(o, n),
        "CosineAnnealingWarmRestarts": lambda o, n: s.CosineAnnealingWarmRestarts(o, 2),
        "OneCycleLR": lambda o, n: s.OneCycleLR(o, 0.1, total_steps=n + 1),
        "CyclicLR": lambda o, n: s.CyclicLR(o, 0.01, 0.1, 2),
        "LambdaLR": lambda o, n: s.LambdaLR(o, lambda step: 1 / (1 + step)),
        "PolynomialLR": lambda o, n: s.PolynomialLR(o, n),
        "warm-up, then cosine": lambda o, n: s.SequentialLR(o, [s.LinearLR(o), s.CosineAnnealingLR(o, n)], [2]),
        "ReduceLROnPlateau": lambda o, n: s.ReduceLROnPlateau(o, patience=0, threshold=0.9),
        "StepLR by epochs": lambda o, n: {"scheduler": s.StepLR(o, 1), "interval": "epoch"},
        "chained": lambda o, n: s.ChainedScheduler([s.ConstantLR(o), s.ExponentialLR(o, 0.9)]),
    }


def _losses() -> dict[str, Any]:
    return {
        "label smoothing": lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1),
        "classes with weights": lambda m, x, y: (
            F.cross_entropy(m(x), y, weight=(w := torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype))),
            w[y].sum(),
        ),
        "ignored labels, (mean, weight)": masked,
        "MSE": lambda m, x, y: F.mse_loss(m(x), one_hot(y)),
        "L1": lambda m, x, y: F.l1_loss(m(x), one_hot(y)),
        "Huber": lambda m, x, y: F.huber_loss(m(x), one_hot(y)),
        "BCE with logits": lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), one_hot(y)),
        "NLL": lambda m, x, y: F.nll_loss(m(x).log_softmax(1), y),
        "KL": lambda m, x, y: F.kl_div(m(x).log_softmax(1), one_hot(y), reduction="batchmean"),
        "triplets": lambda m, x, y: F.triplet_margin_loss(m(x), one_hot(y), one_hot((y + 1) % CLASSES)),
        "multi margin": lambda m, x, y: F.multi_margin_loss(m(x), y),
        "a gradient penalty": penalty,
        "noise in the loss": lambda m, x, y: F.cross_entropy(m(x + 0.1 * torch.randn(x.shape, dtype=x.dtype)), y),
        "samples with random weights": lambda m, x, y: (
            F.cross_entropy(m(x), y, reduction="none") * torch.rand(len(x), dtype=x.dtype)
        ).mean(),
        "a diffusion step's randint": lambda m, x, y: F.cross_entropy(m(x * torch.randint(1, 9, (len(x), 1)) / 9), y),
    }


def _datasets() -> dict[str, Any]:
    return {
        "TensorDataset": lambda c: TensorDataset(*c),
        "a Dataset of pairs": lambda c: Items(c, "pairs"),
        "a Dataset of lists": lambda c: Items(c, "list"),
        "a Dataset of dicts": lambda c: Items(c, "dict"),
        "a Dataset of NumPy arrays": lambda c: Items(c, "numpy"),
        "Subset": lambda c: Subset(TensorDataset(*c), list(range(len(c[0])))[::-1]),
        "ConcatDataset": lambda c: ConcatDataset(
            [TensorDataset(*(t[:20] for t in c)), TensorDataset(*(t[20:] for t in c))]
        ),
        "a list of samples": lambda c: list(zip(*c, strict=True)),
        "a dict of columns": lambda c: {"x": c[0], "y": c[1]},
    }


def kinds() -> list[Kind]:
    """Return all kinds."""
    made = [Kind("model", name, {"net": net}) for name, net in _models().items()]
    made += [Kind("optimizer", name, {"opt": opt}) for name, opt in _optimizers().items()]
    made += [Kind("scheduler", name, {"plan": plan}) for name, plan in _schedulers().items()]
    made += [Kind("loss", name, {"criterion": criterion}) for name, criterion in _losses().items()]
    made += [Kind("dataset", name, {"data": data}) for name, data in _datasets().items()]
    made += [
        Kind("dataset", "IterableDataset", {"data": SizedStream}),
        Kind("dataset", "ragged samples and a collate", {"data": lambda c: Items(c, "ragged"), "gather": padded}),
        Kind(
            "model", "an average of the rows, synced", {"net": around(Stateful("average")), "rules": {"*state": "mean"}}
        ),
        Kind(
            "model",
            "a counter of rows, synced",
            {"net": around(Stateful("count")), "rules": {"*count": "sum"}},
            only="normal",
        ),
    ]
    return [*made, *_named(), *_refused()]


def _named() -> list[Kind]:
    """Return what draws noise inside of an operator: the same with --exact; without, a notice names it."""
    nets = {
        "LSTM with dropout between its layers": around(
            sequence(), By(first, nn.LSTM(4, 4, 2, dropout=0.3, batch_first=True))
        ),
        "AlphaDropout": around(nn.Linear(12, 12), nn.AlphaDropout(0.3)),
        "RReLU": around(nn.Linear(12, 12), nn.RReLU()),
    }
    made = [Kind("model", name, {"net": net}, named="draws random numbers") for name, net in nets.items()]
    return [*made, Kind("loss", "contrastive", {"criterion": contrast}, named="depends on how a batch is split")]


def _refused() -> list[Kind]:
    o = torch.optim
    rows = [
        ("optimizer", "LBFGS", {"opt": lambda p: o.LBFGS(p)}, "needs a closure", ""),
        ("optimizer", "SparseAdam", {"opt": lambda p: o.SparseAdam(p)}, "takes sparse gradients only", ""),
        ("optimizer", "something else", {"opt": lambda p: 3}, "a torch.optim.Optimizer is needed", ""),
        (
            "scheduler",
            "ReduceLROnPlateau, the more the better",
            {"plan": lambda s, n: schedulers.ReduceLROnPlateau(s, "max")},
            "needs a metric of which more is better",
            "",
        ),
        (
            "loss",
            "a sum",
            {"criterion": lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum")},
            "is the sum of",
            "",
        ),
        (
            "loss",
            "a vector",
            {"criterion": lambda m, x, y: F.cross_entropy(m(x), y, reduction="none")},
            "a single number",
            "",
        ),
        ("model", "lazy layers", {"net": lambda: nn.LazyLinear(CLASSES)}, "has lazy modules", ""),
        ("model", "no parameters", {"net": lambda: nn.Identity()}, "there is nothing to train", ""),
        (
            "model",
            "Embedding(max_norm)",
            {"net": around(By(tokens, nn.Embedding(9, 3, max_norm=0.5)), width=36)},
            "max_norm",
            "",
        ),
        ("model", "TorchScript", {"net": script}, "TorchScript", ""),
        ("model", "complex parameters", {"net": around(Complex())}, "torch.view_as_real", ""),
        ("model", "a queue of rows", {"net": around(Stateful("queue"))}, "changes the buffer", "normal"),
        ("model", "an average of the rows", {"net": around(Stateful("average"))}, "changes the buffer", "normal"),
        (
            "model",
            "a parameter that forward changes",
            {"net": around(Stateful("slow"))},
            "changes the parameter",
            "exact",
        ),
        (
            "dataset",
            "DataLoader",
            {"data": lambda c: torch.utils.data.DataLoader(TensorDataset(*c))},
            "is a DataLoader",
            "",
        ),
        ("dataset", "IterableDataset without a length, and epochs", {"data": Stream}, "Give --steps", ""),
    ]
    return [Kind(group, name, options, refused=text, only=only) for group, name, options, text, only in rows]
