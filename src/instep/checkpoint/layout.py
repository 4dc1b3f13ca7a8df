"""The names and the manifest of a checkpoint. Pure: no files are touched, no torch.

    checkpoints/step-00000120/
      model.safetensors, optimizer.safetensors, …     tensors, one file a part of the state
      model-rank-00003.safetensors, …                 or one a part and rank, where several ranks wrote it
      pieces.json                                     then: which piece of which tensor is where
      state.json                                      the parts' skeletons: everything that is not a tensor
      manifest.json                                   written last: format version, step, size and SHA-256 of each file

A directory under another name is not a checkpoint: one being written begins with a dot.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT_VERSION = 2
READABLE = (1, 2)
"""In version 1 an optimizer's state goes by the numbers of its parameters; since version 2 by their names."""
MANIFEST, STATE, PIECES = "manifest.json", "state.json", "pieces.json"
_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of."""

    version: int
    step: int
    files: dict[str, FileEntry]
    scores: dict[str, float] = field(default_factory=dict)
    """The evaluation of this very step, when there was one."""

    def to_json(self) -> dict[str, Any]:
        """Give the object that is written."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Read what was written; a ValueError says what is wrong with it."""
        if not isinstance(data, dict) or not isinstance(data.get("version"), int):
            raise ValueError("no format version")
        if data["version"] not in READABLE:
            readable = " and ".join(map(str, READABLE))
            raise ValueError(f"format version {data['version']}, this instep reads {readable}")
        try:
            files = {name: FileEntry(int(e["num_bytes"]), str(e["sha256"])) for name, e in data["files"].items()}
            step = int(data["step"])
            scores = {str(name): float(value) for name, value in data.get("scores", {}).items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest ({error!r})") from error
        for name in files:
            if not _FILE.fullmatch(name):  # a path in a name could lead out of the checkpoint
                raise ValueError(f"file name {name!r}")
        return cls(data["version"], step, files, scores)


def name_of(step: int) -> str:
    """Name the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Give the step of a checkpoint's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def replaced(name: str) -> str:
    """Name a checkpoint for the moment in which a new one of its step takes its place."""
    return f".{name}.old"


def newest_first(names: Iterable[str]) -> list[str]:
    """Order checkpoint names, newest first; other names are left out."""
    return sorted((n for n in names if step_of(n) is not None), key=lambda n: step_of(n) or 0, reverse=True)


@dataclass(frozen=True)
class Keeping:
    """Which checkpoints stay."""

    newest: int = 3
    every: int | None = None
    """Also those of every so manyth step."""
    best_by: str | None = None
    """Also the best by this metric."""
    smallest: bool = False
    """Whether the best is the smallest."""
    trusted: int | None = None
    """Also the newest that is not newer than this step: where to go back to, if later ones turn out to be wrong."""

    @classmethod
    def of(cls, newest: int, every: int | None, best: str | None) -> Keeping:
        """Read the spec's words; `best` is a metric, with `:min` where less is better."""
        name, _, which = (best or "").partition(":")
        return cls(newest, every, name or None, which == "min")

    @property
    def sign(self) -> int:
        """What makes the best value the largest."""
        return -1 if self.smallest else 1

    def best_of(self, scores: Mapping[str, Mapping[str, float]]) -> tuple[str, float] | None:
        """Find the best checkpoint by its scores, and the value that it was best by; of equals the newest."""
        by = self.best_by or ""
        known = {name: found[by] for name, found in scores.items() if not math.isnan(found.get(by, math.nan))}
        best = max(known, key=lambda name: (self.sign * known[name], step_of(name) or 0), default=None)
        return None if best is None else (best, known[best])

    def to_prune(self, names: Sequence[str], scores: Mapping[str, Mapping[str, float]]) -> list[str]:
        """Choose those that go; `scores` are those of the checkpoints that have some, by name."""
        best = self.best_of(scores)
        ordered = newest_first(names)
        trusted = [name for name in ordered if self.trusted is not None and (step_of(name) or 0) <= self.trusted]
        staying = {*trusted[:1], *(best[:1] if best is not None else ())}
        return [
            name
            for name in ordered[self.newest :]
            if name not in staying and (self.every is None or (step_of(name) or 0) % self.every)
        ]
