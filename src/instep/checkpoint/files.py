"""Write and read the files of one checkpoint.

A checkpoint is written into a directory under a dot name, every file is synced, then the directory is
renamed: whoever finds the final name finds all of it. Reading checks size and SHA-256 of a file before it
is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from instep.checkpoint import layout
from instep.checkpoint.snapshot import Snapshot
from instep.checkpoint.stream import write_synced, write_tensors
from instep.checkpoint.tree import put_together
from instep.core.errors import CheckpointError


def write_checkpoint(
    root: Path, step: int, snapshot: Snapshot, scores: dict[str, float] | None = None
) -> tuple[Path, int]:
    """Write a snapshot under its step's name and give its path and size; `scores`: this step's evaluation.

    Other steps are never touched. An earlier checkpoint of this step is there until the new one is whole.
    """
    final = root / layout.name_of(step)
    scratch = root / f".{final.name}.{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        num_bytes = _write_into(scratch, step, snapshot, scores or {})
        old = root / layout.replaced(final.name)
        if final.exists():
            os.replace(final, old)
        try:
            os.replace(scratch, final)
        except OSError:
            if old.exists():
                os.replace(old, final)
            raise
        sync_directory(root)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(_write_failed(final, error)) from error
    return final, num_bytes


def _write_into(directory: Path, step: int, snapshot: Snapshot, scores: dict[str, float]) -> int:
    files: dict[str, layout.FileEntry] = {}
    for part, tensors in snapshot.tensors.items():
        if tensors:
            name = f"{part}.safetensors"
            files[name] = write_tensors(directory / name, tensors)
    files[layout.STATE] = write_synced(directory / layout.STATE, [json.dumps(snapshot.skeletons).encode()])
    manifest = layout.Manifest(layout.FORMAT_VERSION, step, files, scores)
    write_synced(directory / layout.MANIFEST, [json.dumps(manifest.to_json(), indent=1).encode()])
    sync_directory(directory)
    return sum(entry.num_bytes for entry in files.values())


class Checkpoint:
    """A checkpoint on disk, every file of it checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        self.step = self._manifest.step
        self._data = {name: self._read(name) for name in self._manifest.files}
        try:
            self._skeletons: dict[str, Any] = json.loads(self._data[layout.STATE])
        except ValueError as error:
            raise CheckpointError(f"{path}/{layout.STATE} is not JSON: {error}.") from error

    def __contains__(self, part: str) -> bool:
        return part in self._skeletons

    def part(self, name: str) -> Any:
        """Give one part of the state."""
        if name not in self._skeletons:
            raise CheckpointError(f"{self.path} holds no {name!r}; it has {', '.join(self._skeletons)}.")
        return put_together(self._skeletons[name], self._tensors(name))

    def _tensors(self, part: str) -> dict[str, torch.Tensor]:
        data = self._data.get(f"{part}.safetensors")
        try:
            return load_safetensors(data) if data is not None else {}
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}/{part}.safetensors cannot be read: {error}.") from error

    def _read(self, name: str) -> bytes:
        entry = self._manifest.files[name]
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self.path}/{name} cannot be read: {error}.") from error
        if len(data) != entry.num_bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise CheckpointError(
                f"{self.path}/{name} is damaged: its {len(data)} bytes are not those that were written."
            )
        return data


def read_manifest(path: Path) -> layout.Manifest:
    """Read what a checkpoint consists of."""
    try:
        manifest = layout.Manifest.from_json(json.loads((path / layout.MANIFEST).read_bytes()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {layout.MANIFEST}: {error}.") from error
    if layout.STATE not in manifest.files:
        raise CheckpointError(f"{path} is not a complete checkpoint: its manifest names no {layout.STATE}.")
    return manifest


def replace_synced(path: Path, data: bytes) -> None:
    """Write a file so that at any instant the old one or the new one is there, whole."""
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        write_synced(scratch, [data])
        os.replace(scratch, path)
        sync_directory(path.parent)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise CheckpointError(_write_failed(path, error)) from error


def sync_directory(path: Path) -> None:
    """Make names that were created or renamed in a directory survive a crash."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_failed(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        room = "the disk (or the quota) is full. Free some room"
    else:
        room = f"{error.strerror or error}. Look into that"
    return f"{path} could not be written: {room}. Earlier checkpoints are untouched."
