"""What an export holds, for whom: a state_dict, a folder for `from_pretrained`, an adapter for PEFT.

Another format: a subclass of ExportFormat, and a line in `FORMATS`.

A run directory has a folder `files` beside its checkpoints: what describes the model besides its weights (config.json,
the tokenizer's files; `train/model_files.py` writes it). An export for another library carries it along.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from instep.checkpoint.reader import StoredTensor
from instep.core.errors import CheckpointError
from instep.core.fitted_file import FITTED_FILE

FILES, CONFIG, ADAPTER_CONFIG = "files", "config.json", "adapter_config.json"
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".h5",
    ".msgpack",
    ".pt",
    ".pth",
    ".gguf",
)
Tensors = dict[str, StoredTensor]


class ExportFormat(ABC):
    """Which tensors of a model are exported, under which names, with which files."""

    name: ClassVar[str]
    stem: ClassVar[str] = "model"
    """Of the files' names."""
    may_shard: ClassVar[bool] = True
    needs_all: ClassVar[bool] = True
    """Whether it needs weights that a checkpoint without frozen weights lacks."""

    @abstractmethod
    def tensors(self, state: Tensors, files: Mapping[str, Path]) -> Tensors:
        """Return the tensors by the names that they are exported under."""

    @abstractmethod
    def files(self, folder: Path) -> dict[str, Path]:
        """Return the files to copy, by their relative names; raise CheckpointError if one is missing."""


class Weights(ExportFormat):
    """The state_dict, every name of tied weights in it, for load_state_dict; with what preprocess() fitted."""

    name = "weights"

    def tensors(self, state: Tensors, files: Mapping[str, Path]) -> Tensors:
        del files
        return state

    def files(self, folder: Path) -> dict[str, Path]:
        fitted = folder / FITTED_FILE
        return {FITTED_FILE: fitted} if fitted.is_file() else {}


class HuggingFace(ExportFormat):
    """A folder that `from_pretrained` reads: tied weights once, under their first name, as save_pretrained has it."""

    name = "hf"

    def tensors(self, state: Tensors, files: Mapping[str, Path]) -> Tensors:
        del files
        first: dict[int, str] = {}
        for name, tensor in state.items():
            first.setdefault(id(tensor), name)  # tied ones are one object
        return {name: tensor for name, tensor in state.items() if first[id(tensor)] == name}

    def files(self, folder: Path) -> dict[str, Path]:
        paths = _files_in(folder)
        if ADAPTER_CONFIG in paths and CONFIG not in paths:
            raise CheckpointError(
                f"{folder} describes an adapter (PEFT) and no whole model. Export it with --export peft. A model with "
                "the adapter merged into it: instep.load_model(task, RUN).merge_and_unload().save_pretrained(FOLDER)."
            )
        if CONFIG not in paths:
            raise CheckpointError(
                f"{folder / CONFIG} does not exist, and from_pretrained needs it. A training writes it if the Task's "
                "model has a config of transformers. Else give a folder that has one: --files FOLDER."
            )
        return {name: path for name, path in paths.items() if name != ADAPTER_CONFIG}


class Peft(ExportFormat):
    """An adapter that `PeftModel.from_pretrained` reads."""

    name = "peft"
    stem = "adapter_model"
    may_shard = False
    needs_all = False

    def tensors(self, state: Tensors, files: Mapping[str, Path]) -> Tensors:
        try:
            config = json.loads(files[ADAPTER_CONFIG].read_bytes())
            kind, bias = str(config["peft_type"]), config.get("bias", "none")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{files[ADAPTER_CONFIG]} is not the config of an adapter: {error!r}.") from error
        if kind != "LORA" or bias != "none":
            raise CheckpointError(
                f"the adapter is of the kind {kind} with bias={bias!r}; --export peft knows LORA without biases. Use "
                "PEFT itself: instep.load_model(task, RUN).save_pretrained(FOLDER)."
            )
        named = {adapter_name(name): tensor for name, tensor in state.items()}
        return {name: tensor for name, tensor in named.items() if name}

    def files(self, folder: Path) -> dict[str, Path]:
        paths = _files_in(folder)
        if ADAPTER_CONFIG not in paths:
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG} does not exist, and PEFT needs it. A training writes it if the Task's "
                "model() returns a PeftModel. Else give a folder that has one: --files FOLDER."
            )
        return {name: path for name, path in paths.items() if name != CONFIG}


FORMATS: dict[str, ExportFormat] = {each.name: each for each in (Weights(), HuggingFace(), Peft())}
_LORA = re.compile(r"(.*\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.[^.]+(\.weight|\.bias)?")
_SAVED = re.compile(r"(.*)\.modules_to_save\.[^.]+\.(.*)")


def adapter_name(name: str) -> str:
    """Return the name that PEFT stores a tensor of an adapter under, without the adapter's; empty: it is none."""
    if match := _LORA.fullmatch(name):
        return match[1] + (match[2] or "")
    if match := _SAVED.fullmatch(name):
        return f"{match[1]}.{match[2]}"
    return ""


def _files_in(folder: Path) -> dict[str, Path]:
    """Return the files that describe a model, by relative name: no weights, nothing hidden."""
    names = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: path
        for name, path in names.items()
        if not name.endswith(_WEIGHTS) and not any(part.startswith(".") for part in Path(name).parts)
    }
