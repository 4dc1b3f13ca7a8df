"""Copy a checkpoint into another run, which continues from it with other hyper-parameters ([Note: Forked runs])."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from instep.checkpoint import manifest
from instep.checkpoint.files import Checkpoint, read_manifest, sync_directory
from instep.checkpoint.writer import write_synced


def fork_checkpoint(source: Checkpoint, root: Path, origin: Mapping[str, Any]) -> Path:
    """Copy a checkpoint into the checkpoints of another run, whole or not at all; return its path.

    `origin` has the values of the Task's fields that differ between the runs, as they were where it was saved.
    """
    content = read_manifest(source.path)
    final = root / source.path.name
    scratch = root / f".{final.name}.{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name in content.files:
        if name != manifest.STATE:
            _link_or_copy(source.path / name, scratch / name)
    skeletons = json.loads((source.path / manifest.STATE).read_bytes()) | {manifest.FORK: dict(origin)}
    state = write_synced(scratch / manifest.STATE, [json.dumps(skeletons).encode()])
    content = replace(content, files={**content.files, manifest.STATE: state})
    write_synced(scratch / manifest.MANIFEST, [json.dumps(asdict(content), indent=1).encode()])
    sync_directory(scratch)
    shutil.rmtree(final, ignore_errors=True)  # of a copy that was interrupted before the run could begin
    os.replace(scratch, final)
    sync_directory(root)
    return final


def _link_or_copy(source: Path, target: Path) -> None:
    """Link a file, which is never written to again, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
