"""Write and read the files of one checkpoint.

A checkpoint is written into a directory under a dot name, every file is synced, then the directory is
renamed: whoever finds the final name finds all of it. Reading checks size and SHA-256 of every file before any
is used.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.checkpoint import layout
from instep.checkpoint.inventory import content_problem
from instep.checkpoint.notes import ShareFailed
from instep.checkpoint.snapshot import Snapshot
from instep.checkpoint.stored import TensorFiles, read_whole
from instep.checkpoint.stream import write_synced, write_tensors
from instep.checkpoint.tree import put_together
from instep.core.errors import CheckpointError

if TYPE_CHECKING:
    from instep.checkpoint.sharing import SharedSave


def write_checkpoint(
    root: Path,
    step: int,
    snapshot: Snapshot,
    scores: dict[str, float] | None = None,
    shared: SharedSave | None = None,
) -> tuple[Path, int]:
    """Write a snapshot under its step's name and give its path and size; `scores`: this step's evaluation.

    Other steps are never touched. An earlier checkpoint of this step is there until the new one is whole.
    `shared`: other ranks write their shares of it ([Note: Writing together]); this is rank 0.
    """
    final = root / layout.name_of(step)
    scratch = shared.scratch(root, step) if shared is not None else root / f".{final.name}.{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if shared is None:
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            shared.clear_earlier(root, step)
        scratch.mkdir(exist_ok=shared is not None)
        num_bytes = _write_into(scratch, step, snapshot, scores or {}, shared)
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
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(_write_failed(final, error)) from error
        raise
    return final, num_bytes


def _write_into(
    directory: Path, step: int, snapshot: Snapshot, scores: dict[str, float], shared: SharedSave | None
) -> int:
    files, skeletons = write_parts(directory, snapshot), snapshot.skeletons
    if shared is not None:
        others, skeletons = shared.collect(directory, skeletons)
        files |= others
        files[layout.PIECES] = write_synced(directory / layout.PIECES, [shared.pieces_json()])
    files[layout.STATE] = write_synced(directory / layout.STATE, [json.dumps(skeletons).encode()])
    manifest = layout.Manifest(layout.FORMAT_VERSION, step, files, scores)
    write_synced(directory / layout.MANIFEST, [json.dumps(manifest.to_json(), indent=1).encode()])
    sync_directory(directory)
    return sum(entry.num_bytes for entry in files.values())


def write_parts(directory: Path, snapshot: Snapshot) -> dict[str, layout.FileEntry]:
    """Write the tensors of a snapshot, one file a part; give the files."""
    return {
        snapshot.files[part]: write_tensors(directory / snapshot.files[part], tensors)
        for part, tensors in snapshot.tensors.items()
        if tensors
    }


class Checkpoint:
    """A checkpoint on disk, every file of it checked; `is_verified`: somebody has done that already."""

    def __init__(self, path: Path, is_verified: bool = False) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        self.step = self._manifest.step
        self.version = self._manifest.version
        self.files = tuple(self._manifest.files)
        if not is_verified:
            self.verify(self.files)
        try:
            self._skeletons: dict[str, Any] = json.loads((path / layout.STATE).read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}/{layout.STATE} cannot be read: {error}.") from error
        self._tensors = TensorFiles(path, self._manifest)

    def __contains__(self, part: str) -> bool:
        return part in self._skeletons

    @property
    def parts(self) -> tuple[str, ...]:
        """What it holds."""
        return tuple(self._skeletons)

    def part(self, name: str) -> Any:
        """Give one part of the state, all of it read."""
        return read_whole(self.stored(name))

    def stored(self, name: str) -> Any:
        """Give one part of the state, whose tensors are still to be read; tied ones are one."""
        if name not in self._skeletons:
            raise CheckpointError(f"{self.path} holds no {name!r}; it has {', '.join(self._skeletons)}.")
        try:
            return put_together(self._skeletons[name], self._tensors.part(name))
        except KeyError as error:
            raise CheckpointError(f"{self.path}: {name} names a tensor that is not there, {error}.") from error

    def verify(self, files: Collection[str]) -> None:
        """Read files and compare size and SHA-256; raise at the first that is damaged."""
        for name in files:
            problem = content_problem(self.path / name, self._manifest.files[name])
            if problem is not None:
                raise CheckpointError(f"{self.path}/{name} is damaged: {problem.text}.")


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
    who = f"on rank {error.rank}, " if isinstance(error, ShareFailed) else ""
    return f"{path} could not be written: {who}{room}. Earlier checkpoints are untouched."
