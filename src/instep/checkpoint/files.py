"""Write and read the files of one checkpoint.

A checkpoint is written into a directory whose name begins with a dot. Every file is synced, then the directory is
renamed, so a directory with the final name is always complete. Reading checks the size and SHA-256 of every file before
any of them is used.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.checkpoint import inventory, manifest
from instep.checkpoint.reader import StoredTensor, TensorReader
from instep.checkpoint.snapshot import Snapshot
from instep.checkpoint.state_tree import unflatten_state
from instep.checkpoint.write_reports import ShareFailed
from instep.checkpoint.writer import write_synced, write_tensors
from instep.core.errors import CheckpointError

if TYPE_CHECKING:
    from instep.checkpoint.sharded_save import ShardedSave


def write_checkpoint(
    root: Path,
    step: int,
    snapshot: Snapshot,
    scores: dict[str, float] | None = None,
    sharded: ShardedSave | None = None,
) -> tuple[Path, int]:
    """Write a snapshot as the checkpoint of a step; return its path and size. `scores`: this step's evaluation.

    Other steps are never touched. An earlier checkpoint of this step stays until the new one is complete.
    `sharded`: other ranks write their shares of it ([Note: Writing together]); this is rank 0.
    """
    final = root / manifest.checkpoint_name(step)
    scratch = sharded.scratch if sharded is not None else root / f".{final.name}.{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if sharded is None:
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            sharded.clear_earlier()
        scratch.mkdir(exist_ok=sharded is not None)
        num_bytes = _write_into(scratch, step, snapshot, scores or {}, sharded)
        old = root / manifest.replaced_name(final.name)
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
    directory: Path, step: int, snapshot: Snapshot, scores: dict[str, float], sharded: ShardedSave | None
) -> int:
    files, skeletons = write_parts(directory, snapshot), snapshot.skeletons
    if sharded is not None:
        others, skeletons = sharded.collect(skeletons)
        files |= others
        files[manifest.PIECES] = write_synced(directory / manifest.PIECES, [sharded.pieces_json()])
    files[manifest.STATE] = write_synced(directory / manifest.STATE, [json.dumps(skeletons).encode()])
    content = asdict(manifest.Manifest(manifest.FORMAT_VERSION, step, files, scores))
    write_synced(directory / manifest.MANIFEST, [json.dumps(content, indent=1).encode()])
    sync_directory(directory)
    return sum(entry.num_bytes for entry in files.values())


def write_parts(directory: Path, snapshot: Snapshot) -> dict[str, manifest.FileEntry]:
    """Write the tensors of a snapshot, one file per part; return the files."""
    return {
        snapshot.files[part]: write_tensors(directory / snapshot.files[part], tensors)
        for part, tensors in snapshot.tensors.items()
        if tensors
    }


class Checkpoint:
    """A checkpoint on disk. Every file is verified when it is opened, unless it `is_verified` already."""

    def __init__(self, path: Path, is_verified: bool = False) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        self.step = self._manifest.step
        if manifest.step_of(path.name) not in (None, self.step):
            raise CheckpointError(f"{path} is not the checkpoint that its name says: it holds step {self.step}.")
        self.files = tuple(self._manifest.files)
        if not is_verified:
            self.verify(self.files)
        try:
            self._skeletons: dict[str, Any] = json.loads((path / manifest.STATE).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}/{manifest.STATE} cannot be read: {error}.") from error
        if not isinstance(self._skeletons, dict):
            raise CheckpointError(
                f"{path}/{manifest.STATE} holds a {type(self._skeletons).__name__}, not parts by name."
            )
        self.parts = tuple(self._skeletons)
        self._tensors = TensorReader(path, self._manifest)
        if not is_verified:
            self._verify_parts()

    def part(self, name: str) -> Any:
        """Return one part of the state with all its tensors read; tied ones are read once."""
        return self._unflatten(name, StoredTensor.read)

    def stored(self, name: str) -> Any:
        """Return one part of the state with StoredTensors; tied ones are one object."""
        return self._unflatten(name, lambda tensor: tensor)

    def _unflatten(self, name: str, read: Callable[[StoredTensor], Any]) -> Any:
        if name not in self._skeletons:
            raise CheckpointError(f"{self.path} holds no {name!r}; it has {', '.join(self.parts)}.")
        tensors = {key: read(tensor) for key, tensor in self._tensors.part(name).items()}
        try:
            return unflatten_state(self._skeletons[name], tensors)
        except KeyError as error:
            raise CheckpointError(f"{self.path}: {name} names a tensor that is not there, {error}.") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}/{manifest.STATE}: {name} is not a state: {error}.") from error

    def _verify_parts(self) -> None:
        """Raise CheckpointError if a part's form is wrong, or a tensor is not where it should be; reads no values."""
        for name in self.parts:
            used = {stored.name for stored in _stored_in(self.stored(name))}
            if unused := sorted(self._tensors.part(name).keys() - used):
                raise CheckpointError(f"{self.path}/{manifest.STATE}: {name} does not refer to its tensor {unused[0]}.")
        if not isinstance(self._skeletons.get(manifest.MODEL, {}), dict):
            raise CheckpointError(f"{self.path}/{manifest.STATE}: {manifest.MODEL} is not a state_dict.")
        self._tensors.check()

    def verify(self, files: Collection[str]) -> None:
        """Read files and compare size and SHA-256; raise CheckpointError at the first that is damaged."""
        for name in files:
            problem = inventory.content_problem(self.path / name, self._manifest.files[name])
            if problem is not None:
                raise CheckpointError(f"{self.path}/{name} is damaged: {problem.text}.")


def _stored_in(tree: Any) -> Iterator[StoredTensor]:
    if isinstance(tree, StoredTensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _stored_in(value)


def read_manifest(path: Path) -> manifest.Manifest:
    """Read the manifest of a checkpoint; raise CheckpointError if it is not complete."""
    content = inventory.read_manifest(path)
    if isinstance(content, inventory.Problem):
        raise CheckpointError(f"{path} is not a complete checkpoint: {content}.")
    return content


def replace_synced(path: Path, data: bytes) -> None:
    """Replace a file atomically: at any instant the old or the new one is there, complete."""
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        write_synced(scratch, [data])
        os.replace(scratch, path)
        sync_directory(path.parent)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise CheckpointError(_write_failed(path, error)) from error


def sync_directory(path: Path) -> None:
    """Fsync a directory, so that names that were created or renamed in it survive a crash."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_failed(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cause = "the disk (or the quota) is full. Free some space"
    else:
        cause = f"{error.strerror or error}. Fix the cause"
    who = f"on rank {error.rank}, " if isinstance(error, ShareFailed) else ""
    return f"{path} could not be written: {who}{cause}. Earlier checkpoints are untouched."
