"""The weights of a model: their hash, and loading them from a run, a checkpoint or a file."""

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

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.manifest import EMA, FROZEN, MANIFEST, MODEL
from instep.checkpoint.reader import StoredTensor
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weight_folders import conversion, find_folder
from instep.checkpoint.writer import DTYPES, dtype_name
from instep.core.errors import CheckpointError
from instep.world.tensors import whole_of

if TYPE_CHECKING:
    from instep.world.world import World


def weights_sha256(state: Mapping[str, Any]) -> str:
    """Return the hash of a state_dict: sorted names, each followed by its tensor's little-endian contiguous bytes."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        if isinstance(value, StoredTensor):
            value = value.read()
        if isinstance(value, torch.Tensor):
            _update(digest, name, value)
    return digest.hexdigest()


def sharded_weights_sha256(state: Mapping[str, Any], world: World) -> str:
    """Return the hash of the whole model's state_dict, of which each rank has shards or only some names.

    Called on all ranks. One whole tensor is in memory at a time. A rank that lacks a name gets its tensor from the
    first rank that has it.
    """
    own = {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}
    names_by_rank = world.all_gather_object(
        {name: [dtype_name(value.dtype, name), list(value.shape)] for name, value in own.items()}
    )
    digest = hashlib.sha256()
    for name in sorted(set().union(*names_by_rank)):
        holders = [rank for rank, names in enumerate(names_by_rank) if name in names]
        if name in own:
            with _no_advice():
                value = whole_of(own[name])
        else:
            dtype, shape = names_by_rank[holders[0]][name]
            value = torch.empty(shape, dtype=DTYPES[dtype], device=world.device)
        if len(holders) < world.world_size and value.numel():  # same order of names on all ranks, so no deadlock
            value = value.to(world.device).contiguous()
            world.broadcast([value], holders[0])
        _update(digest, name, value)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, name: str, tensor: torch.Tensor) -> None:
    digest.update(name.encode())
    on_host = tensor.detach().to("cpu").contiguous()
    digest.update(on_host.reshape(-1).view(torch.uint8).numpy().data)


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """Suppress torch's advice on other collectives: a tensor that is sharded twice is gathered twice, once per run."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class Weights(dict[str, torch.Tensor]):
    """Weights by name."""

    frozen: Mapping[str, Any] | None = None
    """Of a checkpoint that leaves frozen weights out: their names, their SHA-256, where they come from."""


def load_weights(source: Path, ema: bool = False) -> Weights:
    """Load a model's state_dict from a run directory, a checkpoint, a .safetensors file or a Hugging Face folder.

    `ema`: with the averaged weights, of a run or a checkpoint.
    """
    if source.is_file():
        _refuse_average(source, ema)
        try:
            return Weights(load_file(source))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{source} is not a safetensors file: {error}.{_conversion(source)}") from error
    if (source / MANIFEST).exists():
        return _weights_of(Checkpoint(source), ema)
    if (folder := find_folder(source)) is not None:
        _refuse_average(source, ema)
        return Weights(folder.read(source))
    if source.is_dir():
        checkpoint, complaints = RunDirectory(source).newest()
        if checkpoint is not None:
            return _weights_of(checkpoint, ema)
        raise CheckpointError(f"{source} holds no good checkpoint, and no model.safetensors. " + " ".join(complaints))
    raise CheckpointError(
        f"{source} does not exist. Weights come from a run directory, a checkpoint, a .safetensors file or a folder "
        "of Hugging Face's."
    )


def _refuse_average(source: Path, ema: bool) -> None:
    if ema:
        raise CheckpointError(f"{source} holds one set of weights. Averaged ones are in a run's checkpoints.")


def _weights_of(checkpoint: Checkpoint, ema: bool) -> Weights:
    weights = Weights(checkpoint.part(MODEL))
    if FROZEN in checkpoint.parts:
        weights.frozen = checkpoint.part(FROZEN)
    if ema:
        check_averaged(checkpoint)
        weights.update(checkpoint.part(EMA)["weights"])
    return weights


def check_averaged(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a checkpoint holds no averaged weights."""
    if EMA not in checkpoint.parts:
        raise CheckpointError(f"{checkpoint.path} holds no averaged weights: the run was trained without --ema.")


def _conversion(source: Path) -> str:
    """Return how to convert a file that torch.save wrote; empty if it is none."""
    try:
        with source.open("rb") as file:
            start = file.read(2)
    except OSError:
        return ""
    if start not in (b"PK", b"\x80\x02"):
        return ""
    return (
        " It seems to be PyTorch's own format, a pickle, which may run code when it is loaded; instep never loads one. "
        f"If you trust it, convert it: {conversion([source], source.with_suffix('.safetensors'))}"
    )
