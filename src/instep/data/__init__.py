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
    from instep.data.sources.jsonl import jsonl
    from instep.data.sources.mds import mds
    from instep.data.sources.parquet import parquet
    from instep.data.sources.tar import tar

__all__ = ["BatchDataset", "OrderSampler", "digits", "jsonl", "mds", "mnist", "parquet", "tar", "text", "tokens"]


def __getattr__(name: str) -> Any:
    # On first use, so that `import instep` does not import torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {
        "BatchDataset": "instep.data.dataset",
        "OrderSampler": "instep.data.sampler",
        **{source: f"instep.data.sources.{source}" for source in ("jsonl", "mds", "parquet", "tar")},
    }.get(name)
    return getattr(import_module(home or f"instep.data.datasets.{name}"), name)


def __dir__() -> list[str]:
    return __all__
