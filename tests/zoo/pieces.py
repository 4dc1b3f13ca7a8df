"""Models, layers, losses and datasets of which the zoo's kinds are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset

NUM_TRAIN, NUM_EVAL, FEATURES, CLASSES = 44, 22, 12, 3


def made_up(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 10), nn.Tanh(), nn.Linear(10, CLASSES))


def around(*layers: nn.Module, width: int = FEATURES) -> Callable[[], nn.Module]:
    """Return what builds a classifier around layers that are given; they are made anew by deep copies."""
    import copy

    def build() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(*copy.deepcopy(nn.ModuleList(layers)), nn.Flatten(), nn.Linear(width, CLASSES))

    return build


class By(nn.Module):
    """A module that is its function."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *self.parts)


def image(channels: int = 3) -> nn.Module:
    return nn.Unflatten(1, (channels, FEATURES // channels // 2, 2))


def sequence(width: int = 4) -> nn.Module:
    return nn.Unflatten(1, (FEATURES // width, width))


def first(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return layer(x)[0]


def time_first(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return layer(x.transpose(0, 1))[0].transpose(0, 1)


def tokens(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return layer((x * 3).long().clamp(-4, 4) + 4)


class Stateful(nn.Module):
    """Keeps something of its rows, or of its weights, in a buffer or a parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(FEATURES, FEATURES)
        self.register_buffer("state", torch.zeros(FEATURES))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.slow = nn.Parameter(torch.ones(FEATURES), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) + 0.1 * self.state * self.slow
        if self.training:
            with torch.no_grad():
                if self.how == "average":
                    self.state.lerp_(x.mean(0), 0.2)
                elif self.how == "count":
                    self.count += len(x)
                elif self.how == "queue":
                    self.state.copy_(x[-1])
                elif self.how == "momentum":
                    self.state.lerp_(self.layer.weight.mean(0), 0.2)
                elif self.how == "slow":
                    self.slow.lerp_(self.layer.weight.mean(0), 0.2)
        return out


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 8), nn.Linear(4, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, scale = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * scale.exp())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


class Partial(nn.Module):
    """Has a frozen layer, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used, self.unused = (nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(torch.tanh(self.frozen(x)))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES, dtype=torch.complex128) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


def script() -> nn.Module:
    return torch.jit.script(mlp())


class Noisy(torch.optim.SGD):
    """Langevin dynamics: its updates have noise."""

    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p), alpha=1e-3)
        return out


def two_groups(params: Any) -> torch.optim.Optimizer:
    bias = [p for name, p in params.named if name.endswith("bias")]
    rest = [p for name, p in params.named if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": bias, "lr": 1e-2}], lr=1e-3)


def penalty(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return F.cross_entropy(model(x), y)
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.logsumexp(1).sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + 0.1 * slope.square().sum(1).mean()


def masked(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (y > 0).double()
    return (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum().clamp(min=1), mask.sum()


def one_hot(y: torch.Tensor) -> torch.Tensor:
    return F.one_hot(y, CLASSES).double()


def contrast(model: Any, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    out = F.normalize(model(x))
    return F.cross_entropy(out @ out.T, torch.arange(len(x)))


class Items(Dataset[Any]):
    def __init__(self, columns: tuple[torch.Tensor, torch.Tensor], kind: str) -> None:
        self.columns, self.kind = columns, kind

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        x, y = (column[index] for column in self.columns)
        if self.kind == "dict":
            return {"x": x, "y": y}
        if self.kind == "numpy":
            return x.numpy(), numpy.int64(y)
        if self.kind == "ragged":
            return x[: 4 + index % 8], y
        if self.kind == "list":
            return [x, int(y)]
        return x, y


class Stream(IterableDataset[Any]):
    def __init__(self, columns: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.columns = columns

    def __iter__(self) -> Any:
        return iter(zip(*self.columns, strict=True))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.columns[0])


def padded(samples: list[Any]) -> Any:
    x = torch.zeros(len(samples), FEATURES, dtype=torch.float64)
    for row, (values, _) in enumerate(samples):
        x[row, : len(values)] = values
    return x, torch.stack([y for _, y in samples])
