"""Write a state as a checkpoint, without a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instep.checkpoint.files import write_checkpoint
from instep.checkpoint.snapshot import FlatState, HostBuffer


def write_state(root: Path, step: int, state: dict[str, Any]) -> tuple[Path, int]:
    """Take a snapshot and write it; return its path and size."""
    return write_checkpoint(root, step, HostBuffer().take(FlatState.of(state)))
