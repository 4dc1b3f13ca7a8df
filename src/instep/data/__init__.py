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
    from instep.data.sequence_lengths import length_curriculum
    from instep.data.sources.jsonl import jsonl
    from instep.data.sources.mds import mds
    from instep.data.sources.parquet import parquet
    from instep.data.sources.tar import tar
    from instep.data.splitting import folds, split
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
    "balanced",
    "bucketed",
    "curriculum",
    "cutmix",
    "digits",
    "folds",
    "grouped",
    "jsonl",
    "length_curriculum",
    "load_fitted",
    "mds",
    "mix",
    "mixup",
    "mnist",
    "parquet",
    "quantiles",
    "split",
    "tar",
    "text",
    "tokens",
    "weighted",
]
_NAMES = {
    "blending": ("cutmix", "mixup"),
    "curricula": ("curriculum",),
    "dataset": ("BatchDataset",),
    "mixture": ("mix",),
    "sampler": ("OrderSampler",),
    "sampling": ("balanced", "bucketed", "grouped", "weighted"),
    "sequence_lengths": ("length_curriculum",),
    **{f"sources.{name}": (name,) for name in ("jsonl", "mds", "parquet", "tar")},
    "splitting": ("folds", "split"),
    "statistics.images": ("ImageNormalizer",),
    "statistics.scalers": ("MinMaxScaler", "RobustScaler", "StandardScaler", "quantiles"),
    "statistics.stored": ("load_fitted",),
    "statistics.vocabulary": ("Vocabulary",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
"""The modules of names that have none of their own in `datasets`."""


def __getattr__(name: str) -> Any:
    # On first use, so that `import instep` does not import torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"instep.data.{_HOMES.get(name, f'datasets.{name}')}"), name)


def __dir__() -> list[str]:
    return __all__
