"""The two splits of every dataset here."""

from __future__ import annotations

from typing import Literal

from instep.core.errors import SpecError

Split = Literal["train", "test"]


def check_split(split: str) -> None:
    """Raise SpecError unless the split is train or test."""
    if split not in ("train", "test"):
        raise SpecError(f"split={split!r} is unknown. Choose 'train' or 'test'.")
