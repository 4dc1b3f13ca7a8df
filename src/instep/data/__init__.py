"""Data: the order of the samples, their way to the device, and a few datasets.

Room: reads files and starts loader processes; knows ranks only as numbers and calls no collective.
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

__all__ = ["BatchDataset", "digits", "mnist", "text", "tokens"]

_HOMES = {
    "BatchDataset": "instep.data.dataset",
    "digits": "instep.data.datasets.digits",
    "mnist": "instep.data.datasets.mnist",
    "text": "instep.data.datasets.text",
    "tokens": "instep.data.datasets.tokens",
}


def __getattr__(name: str) -> Any:
    # On first use, so that `import instep` does not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
