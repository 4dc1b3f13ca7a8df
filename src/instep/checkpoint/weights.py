"""A model's weights alone: their hash, and where they can be had from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from instep.checkpoint import layout
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError


def weights_sha256(state: Mapping[str, Any]) -> str:
    """Hash a state_dict: names sorted, each tensor's little-endian contiguous bytes after its name."""
    digest = hashlib.sha256()
    for name in sorted(state):
        if isinstance(state[name], torch.Tensor):
            tensor = state[name].detach().to("cpu").contiguous()
            digest.update(name.encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_weights(source: Path) -> dict[str, torch.Tensor]:
    """Read a model's state_dict from a run directory, a checkpoint or a .safetensors file."""
    if source.is_file():
        try:
            return load_file(source)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{source} is not a safetensors file: {error}.") from error
    if (source / layout.MANIFEST).exists():
        return dict(Checkpoint(source).part("model"))
    if source.is_dir():
        checkpoint, complaints = RunDirectory(source).newest()
        if checkpoint is not None:
            return dict(checkpoint.part("model"))
        raise CheckpointError(f"{source} holds no good checkpoint. " + " ".join(complaints))
    raise CheckpointError(
        f"{source} does not exist. Weights come from a run directory, a checkpoint or a .safetensors file."
    )
