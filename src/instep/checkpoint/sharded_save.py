"""How the ranks of a sharded model write one checkpoint together: one plan, one scratch directory.

Ranks: all; methods that issue a collective say so. The rest runs in a thread and issues no collective.
"""

import contextlib
import json
import secrets
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from instep.checkpoint.files import write_parts
from instep.checkpoint.manifest import FileEntry, checkpoint_name
from instep.checkpoint.save_plan import Key, LocalShard, Piece, SavePlan, plan_save
from instep.checkpoint.shards import local_shard
from instep.checkpoint.snapshot import FlatState, Snapshot
from instep.checkpoint.state_tree import merge_skeletons
from instep.checkpoint.write_reports import WriteReport, WriteTimeout, wait_for_reports
from instep.core.mesh import AXES
from instep.world.grid import Grid


class ShardedSave(NamedTuple):
    """One checkpoint that several ranks write, as one of them sees it ([Note: Writing together])."""

    plan: SavePlan
    rank: int
    skeleton_ranks: tuple[int, ...]
    """The ranks whose skeletons are needed: the first of each stage."""
    scratch: Path
    """The directory into which all ranks write. No other save has its name, of this run or an earlier one."""
    timeout: WriteTimeout

    @property
    def share(self) -> dict[Key, Piece]:
        """What this rank writes."""
        return self.plan.shares[self.rank]

    @property
    def _reporting_ranks(self) -> list[int]:
        """The ranks from which rank 0 needs a report."""
        shares = enumerate(self.plan.shares)
        return [rank for rank, share in shares if rank and (share or rank in self.skeleton_ranks)]

    def clear_earlier(self) -> None:
        """Delete what earlier, failed saves of this run left; no rank writes to it any more."""
        run = self.scratch.suffix.partition("-")[0]
        for entry in self.scratch.parent.glob(f".step-*{run}-*"):
            if entry != self.scratch:
                shutil.rmtree(entry, ignore_errors=True)

    def write(self, snapshot: Snapshot) -> None:
        """Write this rank's share and a report; not on rank 0."""
        if self.rank not in self._reporting_ranks:
            return
        try:
            self.scratch.mkdir(parents=True, exist_ok=True)
            files = write_parts(self.scratch, snapshot)
            skeletons = snapshot.skeletons if self.rank in self.skeleton_ranks else {}
            WriteReport(files, skeletons).write(self.scratch, self.rank)
        except OSError as error:
            for file in snapshot.files.values():  # a full disk has no space for a report
                (self.scratch / file).unlink(missing_ok=True)
            self.refuse(WriteReport(problem="disk", text=error.strerror or str(error), number=error.errno or 0))
        except BaseException as error:
            self.refuse(WriteReport(problem="other", text=f"{type(error).__name__}: {error}"))
            raise

    def refuse(self, report: WriteReport) -> None:
        """Report to rank 0 why this rank wrote nothing; if that fails too, rank 0 times out."""
        with contextlib.suppress(OSError):
            self.scratch.mkdir(parents=True, exist_ok=True)
            report.write(self.scratch, self.rank)

    def collect(self, skeletons: dict[str, Any]) -> tuple[dict[str, FileEntry], dict[str, Any]]:
        """Wait for the other ranks; return their files, and the skeletons of all ranks merged. On rank 0 only."""
        reports = wait_for_reports(self.scratch, self._reporting_ranks, self.timeout)
        files: dict[str, FileEntry] = {}
        for rank in sorted(reports):
            files |= reports[rank].files
            skeletons = merge_skeletons(skeletons, reports[rank].skeletons)
        return files, skeletons

    def pieces_json(self) -> bytes:
        """Return the content of pieces.json."""
        return json.dumps(
            {
                part: {name: metadata.to_json() for name, metadata in tensors.items()}
                for part, tensors in self.plan.tensors.items()
            }
        ).encode()


class SavePlanner:
    """Agrees with the other ranks on which rank writes what; again only if the local shards of a rank have changed."""

    def __init__(self, grid: Grid) -> None:
        self._world = grid.world
        self._skeleton_ranks = tuple(
            rank
            for rank in range(grid.mesh.size)
            if not any(grid.mesh.coordinate(rank, axis) for axis in AXES if axis != "pp")
        )
        self.timeout = WriteTimeout()
        self._run = str(self._world.broadcast_object(secrets.token_hex(4)))
        self._number = 0
        self._structure: list[Any] = []
        self._plan = SavePlan({}, ())

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank. Called on all ranks."""
        own = torch.tensor([float(flag)], device=self._world.device)
        return float(self._world.all_reduce(own)) > 0

    def plan(self, state: FlatState) -> SavePlan:
        """Return the plan that all ranks agree on. Called on all ranks."""
        structure = [  # what a plan depends on; fast, because a save waits for it
            (key, tensor.dtype, tensor.shape, getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))
            for key, tensor in state.tensors.items()
        ]
        if self.any(structure != self._structure):
            own = [[*key, *local_shard(key, state)] for key in state.tensors]
            self._plan = plan_save(
                [
                    {(part, name): LocalShard.from_json(data) for part, name, *data in rows}
                    for rows in self._world.all_gather_object(own)
                ]
            )
        self._structure = structure
        return self._plan

    def begin(self, state: FlatState, root: Path, step: int) -> ShardedSave:
        """Begin the checkpoint of a step, with the current state. Called on all ranks."""
        plan = self.plan(state)
        self._number += 1
        scratch = root / f".{checkpoint_name(step)}.{self._run}-{self._number}"
        return ShardedSave(plan, self._world.rank, self._skeleton_ranks, scratch, self.timeout)
