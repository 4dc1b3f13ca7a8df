"""The files of a checkpoint, their names and the manifest. Pure: no file access, no torch.

    checkpoints/step-00000120/
      model.safetensors, optimizer.safetensors, …     tensors, one file per part of the state
      model-rank-00003.safetensors, …                 or one file per part and rank, if several ranks wrote it
      pieces.json                                     in that case: which piece of which tensor is in which file
      state.json                                      the skeletons of the parts: everything that is not a tensor
      manifest.json                                   written last: format version, step, size and SHA-256 of each file

A directory with another name is not a checkpoint. While a checkpoint is being written, its name begins with a dot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""Version 1 stores an optimizer's state by parameter number, version 2 by parameter name."""
MANIFEST, STATE, PIECES = "manifest.json", "state.json", "pieces.json"
MODEL = "model"
EMA = "ema"
"""The parts of a model, and of the average of its weights; those of further models have a number."""
"""The part with the weights; those of further models are `model-1`, `model-2`, …"""
FROZEN = "frozen"
"""The part that describes frozen weights which the model's part leaves out."""
FORK = "fork"
"""The part that a checkpoint has which was copied from another run: the values of the Task's fields there."""
_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of one file of a checkpoint."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json: what a complete checkpoint consists of."""

    version: int
    step: int
    files: dict[str, FileEntry]
    scores: dict[str, float] = field(default_factory=dict)
    """The evaluation of this step, if there was one."""

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Parse the object that was written; raise ValueError if it is not a manifest."""
        if not isinstance(data, dict) or not isinstance(data.get("version"), int):
            raise ValueError("no format version")
        if data["version"] not in READABLE_VERSIONS:
            readable = " and ".join(map(str, READABLE_VERSIONS))
            raise ValueError(f"format version {data['version']}, this instep reads {readable}")
        try:
            files = {name: FileEntry(int(e["num_bytes"]), str(e["sha256"])) for name, e in data["files"].items()}
            step = data["step"]
            scores = {str(name): float(value) for name, value in data.get("scores", {}).items()}
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a manifest ({error!r})") from error
        if type(step) is not int or step < 0:
            raise ValueError(f"step {step!r:.40}")
        for name in files:
            if not _FILE.fullmatch(name):  # a name with a path in it could point outside the checkpoint
                raise ValueError(f"file name {name!r}")
        return cls(data["version"], step, files, scores)


def checkpoint_name(step: int) -> str:
    """Return the directory name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def replaced_name(name: str) -> str:
    """Return the name that a checkpoint has while a new checkpoint of the same step replaces it."""
    return f".{name}.old"


def newest_first(names: Iterable[str]) -> list[str]:
    """Return the names that are checkpoint names, newest first."""
    return sorted((n for n in names if step_of(n) is not None), key=lambda n: step_of(n) or 0, reverse=True)
