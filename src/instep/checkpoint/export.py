"""Write a checkpoint's weights as other programs expect them: safetensors, named as Hugging Face names them.

    FOLDER/model.safetensors                                               if it fits into one shard
    FOLDER/model-00001-of-00003.safetensors, … model.safetensors.index.json    if not
    NAME.safetensors                                                       a target that ends so: one file

A tied weight is stored once in a checkpoint. It is written under each of its names, so that
`load_state_dict` finds all of them without knowing what is tied. One tensor is in memory at a time, so that a model
that several ranks trained can be exported where it would not fit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.checkpoint.files import Checkpoint, sync_directory
from instep.checkpoint.stored import Stored
from instep.checkpoint.stream import Readable, write_synced, write_tensors
from instep.checkpoint.weights import weights_sha256
from instep.core.errors import CheckpointError, SpecError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
Shard = dict[str, Readable]


@dataclass(frozen=True)
class ExportSpec:
    """Where weights are to go, and how."""

    target: Path
    max_shard_bytes: int = 5 * 10**9
    force: bool = False

    @property
    def is_file(self) -> bool:
        """Whether one file was asked for, whatever its size."""
        return self.target.suffix == ".safetensors"

    @property
    def folder(self) -> Path:
        """Where the files will lie."""
        return self.target.parent if self.is_file else self.target


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    files: tuple[Path, ...]
    num_tensors: int
    num_bytes: int
    weights_sha256: str
    replaced: tuple[Path, ...]
    """Files that were there before and are replaced or gone."""
    left_out: tuple[str, ...]
    """Names in the model's state that are no tensors."""
    other_models: tuple[str, ...]
    """Models of the same checkpoint that are not in it."""


def read_size(text: str) -> int:
    """Read a number of bytes: 5GB, 500MB, 2GiB, 1000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise SpecError(f"max-shard={text!r} is not a size. Use for instance 5GB, 500MB or 2GiB.")
    return int(float(match[1]) * unit)


def check_target(spec: ExportSpec, source: Path) -> tuple[Path, ...]:
    """Refuse a target that cannot be written, would harm the source or is taken; give the files to be replaced."""
    target, folder = spec.target, spec.folder
    if not spec.is_file and target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file. Export into a folder, or into a name that ends in .safetensors.")
    if spec.is_file and target.is_dir():
        raise CheckpointError(f"{target} is a folder, and its name is a file's. Give another name to export to.")
    if _is_inside(folder, source):
        raise CheckpointError(
            f"{target} lies among a run's checkpoints, which must stay as they are. Export elsewhere."
        )
    if spec.is_file:
        taken = [target] if target.exists() or target.is_symlink() else []
    else:
        names = sorted(each.name for each in target.iterdir()) if target.is_dir() else []
        taken = [target / name for name in names if name in (SINGLE, INDEX) or _SHARD.fullmatch(name)]
    if taken and not spec.force:
        raise CheckpointError(
            f"{', '.join(map(str, taken))} {'is' if len(taken) == 1 else 'are'} there already. "
            "Give another target, or --force to replace."
        )
    return tuple(taken)


def export(checkpoint: Path, spec: ExportSpec) -> ExportResult:
    """Write the weights of a checkpoint that has been verified."""
    taken = check_target(spec, checkpoint)
    state, others = _read_model(checkpoint)
    tensors: Shard = {name: value for name, value in state.items() if isinstance(value, Stored)}
    if not tensors:
        raise CheckpointError(f"the model in {checkpoint} has no weights, so there is nothing to export.")
    shards = [tensors] if spec.is_file else cut(tensors, spec.max_shard_bytes)
    try:
        written = _write(shards, spec, taken)
    except OSError as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{spec.target} cannot be written: {why}. Look into that, then export again.") from error
    return ExportResult(
        files=tuple(written),
        num_tensors=len(tensors),
        num_bytes=sum(map(_num_bytes, tensors.values())),
        weights_sha256=weights_sha256(tensors),
        replaced=taken,
        left_out=tuple(sorted(state.keys() - tensors.keys())),
        other_models=others,
    )


def cut(tensors: Mapping[str, Readable], max_bytes: int) -> list[Shard]:
    """Fill shards in order; a tensor that is larger than a shard has one to itself."""
    shards: list[Shard] = [{}]
    used = 0
    for name, tensor in tensors.items():
        size = _num_bytes(tensor)
        if shards[-1] and used + size > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    return shards


def _read_model(checkpoint: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Give the model's state, its tensors still to be read, and the names of other models."""
    try:
        found = Checkpoint(checkpoint, is_verified=True)
        state = found.stored("model")
        others = tuple(sorted(part for part in found.parts if re.fullmatch(r"model-\d+", part)))
        return {str(name): value for name, value in state.items()}, others
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"the model in {checkpoint} cannot be read: {error!r}.") from error


def _write(shards: list[Shard], spec: ExportSpec, taken: tuple[Path, ...]) -> list[Path]:
    """Write all under other names, then rename; at no instant do old and new files look like one model."""
    spec.folder.mkdir(parents=True, exist_ok=True)
    names = _names(shards, spec)
    indexed = [INDEX] if len(shards) > 1 else []
    finals = [spec.folder / name for name in names + indexed]
    scratch = {final: final.with_name(f".{final.name}.{os.getpid()}") for final in finals}
    try:
        for final, shard in zip(finals, shards, strict=False):
            write_tensors(scratch[final], shard, {"format": "pt"})  # transformers refuses a file without that
        if indexed:
            write_synced(scratch[finals[-1]], [_index(names, shards)])
            _remove(taken)  # an old index must not lead to new shards
        for final, written in scratch.items():  # the index last: whoever finds it finds the shards
            os.replace(written, final)
        _remove(set(taken) - set(finals))
        sync_directory(spec.folder)
    finally:
        _remove(scratch.values())
    return finals


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _names(shards: list[Shard], spec: ExportSpec) -> list[str]:
    if spec.is_file:
        return [spec.target.name]
    if len(shards) == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]


def _index(names: list[str], shards: list[Shard]) -> bytes:
    total = sum(_num_bytes(tensor) for shard in shards for tensor in shard.values())
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _num_bytes(tensor: Readable) -> int:
    return tensor.numel() * tensor.element_size()


def _is_inside(folder: Path, source: Path) -> bool:
    """Tell whether a folder is a checkpoint, or anything among the checkpoints of its run."""
    home = source.resolve()
    home = home.parent if home.parent.name == "checkpoints" else home
    return folder.resolve().is_relative_to(home)
