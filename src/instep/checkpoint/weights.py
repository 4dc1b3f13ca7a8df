"""A model's weights alone: their hash, and where they can be had from."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from instep.checkpoint import layout
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.stored import Stored
from instep.checkpoint.stream import DTYPES, check_dtype, name_of_dtype
from instep.core.errors import CheckpointError
from instep.world.tensors import whole_of

if TYPE_CHECKING:
    from instep.world.world import World


class _Hash:
    """The hash of tensors that come in the order of their names."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._digest.update(name.encode())
        here = tensor.detach().to("cpu").contiguous()
        self._digest.update(here.reshape(-1).view(torch.uint8).numpy().data)

    def hex(self) -> str:
        return self._digest.hexdigest()


def weights_sha256(state: Mapping[str, Any]) -> str:
    """Hash a state_dict: names sorted, each tensor's little-endian contiguous bytes after its name."""
    digest = _Hash()
    for name in sorted(state):
        value = state[name]
        if isinstance(value, Stored):
            value = value.read()
        if isinstance(value, torch.Tensor):
            digest.add(name, value)
    return digest.hex()


def spread_weights_sha256(state: Mapping[str, Any], world: World) -> str:
    """Hash the whole model's state_dict, of which each rank has some names, or shards: one whole tensor at a time.

    Called on all ranks. Each hashes what it has whole, and what it lacks as the first rank has it that does not.
    """
    own = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, value in own.items():
        check_dtype(name, value.dtype)
    told = world.all_gather_object(
        {name: [name_of_dtype(value.dtype), list(value.shape)] for name, value in own.items()}
    )
    digest = _Hash()
    for name in sorted(set().union(*told)):
        holders = [rank for rank, names in enumerate(told) if name in names]
        dtype, shape = told[holders[0]][name]
        if name in own:
            value = own[name].detach()
            with _no_advice():
                value = whole_of(value)
        else:
            value = torch.empty(shape, dtype=DTYPES[dtype], device=world.device)
        if (
            len(holders) < world.world_size and value.numel()
        ):  # in the order of the names on every rank, so nobody waits in vain
            value = value.to(world.device).contiguous()
            world.broadcast([value], holders[0])
        digest.add(name, value)
    return digest.hex()


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """Keep torch from advising other collectives: a tensor that is cut twice is gathered twice, once in a run."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


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
