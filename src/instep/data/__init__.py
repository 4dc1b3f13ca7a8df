"""Data: the order of the samples, the loaders that bring them to the device, and a few datasets.

This package reads files and starts loader processes. It knows ranks only as numbers and issues no collectives.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.data.dataset import BatchDataset
    from instep.data.datasets.digits import digits
    from instep.data.datasets.mnist import mnist
    from instep.data.datasets.text import text
    from instep.data.datasets.tokens import tokens
    from instep.data.sampler import OrderSampler
    from instep.data.statistics.images import ImageNormalizer
    from instep.data.statistics.scalers import MinMaxScaler, RobustScaler, StandardScaler, quantiles
    from instep.data.statistics.stored import load_fitted
    from instep.data.statistics.vocabulary import Vocabulary

__all__ = [
    "BatchDataset",
    "ImageNormalizer",
    "MinMaxScaler",
    "OrderSampler",
    "RobustScaler",
    "StandardScaler",
    "Vocabulary",
    "digits",
    "load_fitted",
    "mnist",
    "quantiles",
    "text",
    "tokens",
]
_SCALERS = ("MinMaxScaler", "RobustScaler", "StandardScaler", "quantiles")
_HOMES = {
    **dict.fromkeys(_SCALERS, "instep.data.statistics.scalers"),
    "BatchDataset": "instep.data.dataset",
    "ImageNormalizer": "instep.data.statistics.images",
    "OrderSampler": "instep.data.sampler",
    "Vocabulary": "instep.data.statistics.vocabulary",
    "load_fitted": "instep.data.statistics.stored",
}


def __getattr__(name: str) -> Any:
    # On first use, so that `import instep` does not import torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, f"instep.data.datasets.{name}")), name)


def __dir__() -> list[str]:
    return __all__
