"""Data: the order of the samples, the loaders that bring them to the device, and a few datasets.

This package reads files and starts loader processes. It knows ranks only as numbers and issues no collectives.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.data.curricula import curriculum
    from instep.data.dataset import BatchDataset
    from instep.data.datasets.digits import digits
    from instep.data.datasets.mnist import mnist
    from instep.data.datasets.text import text
    from instep.data.datasets.tokens import tokens
    from instep.data.sampler import OrderSampler
    from instep.data.sequence_lengths import length_curriculum

__all__ = ["BatchDataset", "OrderSampler", "curriculum", "digits", "length_curriculum", "mnist", "text", "tokens"]

_HOMES = {
    "BatchDataset": "dataset",
    "OrderSampler": "sampler",
    "curriculum": "curricula",
    "length_curriculum": "sequence_lengths",
}
"""The modules of names that are not in `datasets`."""


def __getattr__(name: str) -> Any:
    # On first use, so that `import instep` does not import torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"instep.data.{_HOMES.get(name, f'datasets.{name}')}"), name)


def __dir__() -> list[str]:
    return __all__
