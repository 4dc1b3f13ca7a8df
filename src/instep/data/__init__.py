"""Data: the order of the samples, the loaders that bring them to the device, and a few datasets.

This package reads files and starts loader processes. It knows ranks only as numbers and issues no collectives.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.data.blending import cutmix, mixup
    from instep.data.curricula import curriculum
    from instep.data.dataset import BatchDataset
    from instep.data.datasets.digits import digits
    from instep.data.datasets.mnist import mnist
    from instep.data.datasets.text import text
    from instep.data.datasets.tokens import tokens
    from instep.data.mixture import mix
    from instep.data.sampler import OrderSampler
    from instep.data.sampling import balanced, bucketed, grouped, weighted
    from instep.data.splitting import folds, split

__all__ = ["BatchDataset", "OrderSampler", "balanced", "bucketed", "curriculum", "cutmix", "digits", "folds", "grouped", "length_curriculum", "mix", "mixup", "mnist", "split", "text", "tokens", "weighted",]
    from instep.data.sequence_lengths import length_curriculum



_HOMES = {
    "BatchDataset": "dataset",
    "OrderSampler": "sampler",
    **dict.fromkeys(("balanced", "bucketed", "grouped", "weighted"), "sampling"),
    **dict.fromkeys(("folds", "split"), "splitting"),
    "mix": "mixture",
    **dict.fromkeys(("cutmix", "mixup"), "blending"),
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
