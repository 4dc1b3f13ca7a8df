"""The two halves that every dataset here comes in."""

from __future__ import annotations

from typing import Literal

from instep.core.errors import SpecError

Split = Literal["train", "test"]


def check_split(split: str) -> None:
    """Refuse what is neither train nor test."""
    if split not in ("train", "test"):
        raise SpecError(f"split={split!r} is unknown. Choose 'train' or 'test'.")
