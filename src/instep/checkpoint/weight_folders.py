"""Read weights from folders of other programs: what Hugging Face's `save_pretrained` writes.

    FOLDER/model.safetensors                          one file
    FOLDER/model.safetensors.index.json, model-…      shards, and which tensor is in which
    FOLDER/pytorch_model.bin                          a pickle: refused, with the command that converts it

Another layout: a subclass of WeightFolder, and a line in `_FOLDERS`.
"""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from instep.core.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFolder(ABC):
    """A layout of weights in a folder."""

    @abstractmethod
    def is_in(self, folder: Path) -> bool:
        """Return whether a folder has this layout."""

    @abstractmethod
    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """Read the weights by name; raise CheckpointError with what is wrong."""


class SingleFile(WeightFolder):
    """All weights in one file."""

    def is_in(self, folder: Path) -> bool:
        return (folder / SINGLE).is_file()

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        return _read_file(folder / SINGLE)


class Sharded(WeightFolder):
    """Files that an index names."""

    def is_in(self, folder: Path) -> bool:
        return (folder / INDEX).is_file()

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        by_file: dict[str, list[str]] = {}
        for tensor, file in _read_index(folder / INDEX).items():
            by_file.setdefault(file, []).append(tensor)
        for file, names in by_file.items():
            if not (folder / file).is_file():
                raise CheckpointError(
                    f"{folder} lacks {file}: {INDEX} says that it holds {len(names)} of the "
                    f"{sum(map(len, by_file.values()))} tensors, {names[0]} for instance. Copy or download it again."
                )
        return {name: tensor for file, names in by_file.items() for name, tensor in _read_some(folder / file, names)}


class Pickled(WeightFolder):
    """What torch.save wrote: never read."""

    def is_in(self, folder: Path) -> bool:
        return any(_pickles(folder))

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        names = ", ".join(path.name for path in _pickles(folder))
        raise CheckpointError(
            f"{folder} holds {names} and no safetensors file. That is a pickle, which may run code when it is loaded; "
            f"instep never loads one. If you trust it, convert it: {conversion(_pickles(folder), folder / SINGLE)}"
        )


_FOLDERS: tuple[WeightFolder, ...] = (SingleFile(), Sharded(), Pickled())
"""In the order in which from_pretrained looks for them."""


def find_folder(path: Path) -> WeightFolder | None:
    """Return the layout of a folder with weights; None: it has none that is known."""
    return next((layout for layout in _FOLDERS if layout.is_in(path)), None) if path.is_dir() else None


def conversion(pickles: Sequence[Path], target: Path) -> str:
    """Return a command that converts files of torch.save; without running code of theirs."""
    # Copies: safetensors does not store tensors that share memory, as tied weights do.
    program = (
        "import torch, safetensors.torch as s; "
        f"s.save_file({{k: v.clone() for f in {list(map(str, pickles))!r} "
        f"for k, v in torch.load(f, weights_only=True).items()}}, {str(target)!r}, {{'format': 'pt'}})"
    )
    quoted = shlex.quote(program) if set(program) & set('"$`\\!') else f'"{program}"'
    return f"python -c {quoted}"


def _pickles(folder: Path) -> list[Path]:
    return sorted(folder.glob("pytorch_model*.bin"))


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}. Copy or download it again.") from error


def _read_some(path: Path, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            if lost := [name for name in names if name not in held]:
                raise CheckpointError(f"{path} has no tensor {lost[0]}, though {INDEX} says so. Copy both again.")
            return [(name, file.get_tensor(name)) for name in names]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}. Copy or download it again.") from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map: Any = json.loads(path.read_bytes())["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index of weights: {error!r}. Copy or download it again.") from error
    for file in files.values():
        if Path(file).name != file or file in (".", ".."):  # a path in it could lead outside of the folder
            raise CheckpointError(f"{path} names {file!r:.80}, which is not a file beside it.")
    if not files:
        raise CheckpointError(f"{path} names no tensors.")
    return files
