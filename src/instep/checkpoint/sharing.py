"""How the ranks of a spread model save one checkpoint together: one plan, one scratch directory.

Ranks: all; what is called on all ranks says so. The rest runs in a thread and issues no collective.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from instep.checkpoint import layout
from instep.checkpoint.files import write_parts
from instep.checkpoint.merge import merge
from instep.checkpoint.notes import Note, Patience, remove_notes, wait_for_notes
from instep.checkpoint.pieces import Key, LocalShard, Piece, SavePlan, plan_save
from instep.checkpoint.shards import holding_of
from instep.checkpoint.snapshot import Parts, Snapshot
from instep.world.grid import Grid


@dataclass(frozen=True)
class SharedSave:
    """One checkpoint that several ranks write, seen from one of them ([Note: Writing together])."""

    plan: SavePlan
    rank: int
    tellers: tuple[int, ...]
    """The ranks whose skeletons are needed: the first of each stage."""
    token: str
    """In the scratch directory's name: no other save, of this run or an earlier one, has it."""
    patience: Patience

    @property
    def share(self) -> dict[Key, Piece]:
        """What this rank writes."""
        return self.plan.shares[self.rank]

    @property
    def _others(self) -> list[int]:
        """Those from whom rank 0 needs a note."""
        return [rank for rank, share in enumerate(self.plan.shares) if rank and (share or rank in self.tellers)]

    def scratch(self, root: Path, step: int) -> Path:
        """Where all ranks write."""
        return root / f".{layout.name_of(step)}.{self.token}"

    def clear_earlier(self, root: Path, step: int) -> None:
        """Remove what an earlier save of this run left that came to nothing; nobody writes to it any more."""
        own, run = self.scratch(root, step), self.token.partition("-")[0]
        for entry in root.glob(f".step-*.{run}-*"):
            if entry != own:
                shutil.rmtree(entry, ignore_errors=True)

    def write(self, root: Path, step: int, snapshot: Snapshot) -> None:
        """Write this rank's share and leave a note; not on rank 0."""
        if self.rank not in self._others:
            return
        directory = self.scratch(root, step)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            files = write_parts(directory, snapshot)
            Note(files, snapshot.skeletons if self.rank in self.tellers else {}).leave(directory, self.rank)
        except OSError as error:
            for file in snapshot.files.values():  # a full disk has no room for a note
                (directory / file).unlink(missing_ok=True)
            self.refuse(root, step, Note(problem="disk", text=error.strerror or str(error), number=error.errno or 0))
        except BaseException as error:
            self.refuse(root, step, Note(problem="other", text=f"{type(error).__name__}: {error}"))
            raise

    def refuse(self, root: Path, step: int, note: Note) -> None:
        """Tell rank 0 why there is no share of this rank; where that is not possible, it will notice."""
        directory = self.scratch(root, step)
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            note.leave(directory, self.rank)

    def collect(self, directory: Path, skeletons: dict[str, Any]) -> tuple[dict[str, layout.FileEntry], dict[str, Any]]:
        """Wait for the other ranks' shares; give their files, and all skeletons together. On rank 0 only."""
        notes = wait_for_notes(directory, self._others, self.patience)
        files: dict[str, layout.FileEntry] = {}
        for rank in sorted(notes):
            files |= notes[rank].files
            skeletons = merge(skeletons, notes[rank].skeletons)
        remove_notes(directory, notes)
        return files, skeletons

    def pieces_json(self) -> bytes:
        """Say where everything is."""
        return json.dumps(
            {
                part: {name: pieces.to_json() for name, pieces in tensors.items()}
                for part, tensors in self.plan.tensors.items()
            }
        ).encode()


class Sharing:
    """Agrees with the other ranks on who writes what; again only when one of them holds something else."""

    def __init__(self, grid: Grid) -> None:
        self._world = grid.world
        self._tellers = tuple(
            rank
            for rank in range(grid.mesh.size)
            if not any(grid.mesh.coordinate(rank, axis) for axis in ("dp", "fsdp", "tp"))
        )
        self.patience = Patience()
        self._run = str(self._world.broadcast_object(secrets.token_hex(4)))
        self._number = 0
        self._structure: list[Any] = []
        self._plan = SavePlan({}, ())

    def any(self, flag: bool) -> bool:
        """Tell whether it is so on any rank. Called on all ranks."""
        own = torch.tensor([float(flag)], device=self._world.device)
        return float(self._world.all_reduce(own)) > 0

    def plan(self, parts: Parts) -> SavePlan:
        """Agree on who writes what. Called on all ranks."""
        structure = _structure(parts)
        if self.any(structure != self._structure):
            held = {key: holding_of(key, tensor) for key, tensor in parts.tensors.items()}
            told = self._world.all_gather_object([[*key, *holding.to_json()] for key, holding in held.items()])
            self._plan = plan_save([_holdings(rows) for rows in told])
        self._structure = structure
        return self._plan

    def begin(self, parts: Parts) -> SharedSave:
        """Begin a checkpoint of what the ranks hold now. Called on all ranks."""
        plan = self.plan(parts)
        self._number += 1
        token = f"{self._run}-{self._number}"
        return SharedSave(plan, self._world.rank, self._tellers, token, self.patience)


def _structure(parts: Parts) -> list[Any]:
    """Give what a plan depends on, quickly: a save waits for it."""
    return [
        (key, tensor.dtype, tensor.shape, getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))
        for key, tensor in parts.tensors.items()
    ]


def _holdings(rows: list[list[Any]]) -> dict[Key, LocalShard]:
    return {(part, name): LocalShard.from_json(rest) for part, name, *rest in rows}
