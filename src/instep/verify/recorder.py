"""Inside a rank: record what is compared, and disturb the training as planned.

Ranks: all; each writes its own file.
"""

import functools
import hashlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.data.batch_plan import PartPlan
from instep.train.source import TaskSource
from instep.train.worker import process_settings, worker_main
from instep.world.tensors import nested_tensors
from instep.world.world import World, place_here

GRADIENTS = "gradients.safetensors"
_SAVE_LIMIT_S = 30.0


@dataclass(frozen=True)
class WatchPlan:
    """What to record, and how to disturb the training."""

    folder: str
    compare_contents: bool = True
    """Whether a row of a batch depends on its sample alone; a Task's collate may pad it to the other rows."""
    kill_at: int = 0
    """The step after which the last rank kills itself; 0: none."""
    disturb: float = 0.0
    """The number of roundings by which to disturb every gradient ([Note: The twin]); 0: none."""


def watched_main(attempt: int, source: TaskSource, spec: TrainSpec, run_dir: str, plan: WatchPlan) -> dict[str, Any]:
    """Run a recorded rank; return its result to the launcher."""
    place = place_here()
    task = source.load()
    with process_settings(spec, place.local_world_size), World.join(place, comm=spec.comm) as world:
        directory = RunDirectory(Path(run_dir))
        recorder = Recorder(plan, world.rank, world.world_size, directory)
        return worker_main(world, task, spec, directory, attempt, recorder).to_json()


class Recorder:
    """A witness of the training that writes to `rank-N.jsonl` of its folder."""

    def __init__(self, plan: WatchPlan, rank: int, world_size: int, directory: RunDirectory) -> None:
        self._plan = plan
        self._directory = directory
        self._is_main, self._is_last = rank == 0, rank == world_size - 1
        self._folder = Path(plan.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / f"rank-{rank}.jsonl").open("w", buffering=1)  # a rank may be killed
        self._hooks: list[Any] = []
        self._dtypes: set[torch.dtype] = set()
        self._terms: dict[str, list[torch.Tensor]] = {}
        """What the gradients of biases are added up from: the sums of the terms, and of their absolute values."""

    def begin(self, model: nn.Module) -> None:
        """Record the precision in which layers compute, and the terms of sums, until there are gradients."""

        def note(name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
            self._dtypes |= {tensor.dtype for tensor in nested_tensors(output) if tensor.is_floating_point()}
            bias = getattr(module, "bias", None)
            if isinstance(bias, nn.Parameter) and isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda gradient: self._note_terms(f"{name}.bias", bias.numel(), gradient))

        self._hooks = [m.register_forward_hook(functools.partial(note, name)) for name, m in model.named_modules()]

    def _note_terms(self, name: str, num_channels: int, gradient: torch.Tensor) -> None:
        """Add the terms of a bias's gradient, which is the sum of its output's over all but the channels."""
        channels = 1 if gradient.dim() > 2 and gradient.shape[1] == num_channels else gradient.dim() - 1
        if not self._hooks or gradient.dim() < 2 or gradient.shape[channels] != num_channels:
            return
        terms = gradient.detach().movedim(channels, 0).reshape(num_channels, -1).double()
        sums = [terms.sum(1), terms.abs().sum(1)]
        before = self._terms.get(name)
        self._terms[name] = sums if before is None else [a + b for a, b in zip(before, sums, strict=True)]

    def part(self, step: int, plan: PartPlan, indices: Sequence[int], batch: Any) -> None:
        """Record the samples of a part, and digests of their contents."""
        digests = row_digests(batch, plan.num_rows) if self._plan.compare_contents else None
        self._write(
            step=step,
            first_row=plan.first_row,
            counted=plan.counted,
            indices=list(map(int, indices)),
            digests=digests or [""] * plan.num_rows,
        )

    def gradients(self, step: int, model: nn.Module) -> None:
        """Save the first step's gradients; disturb every step's, if asked to."""
        for hook in self._hooks:
            hook.remove()
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if self._hooks:
            self._hooks = []
            self._write(eps=max((torch.finfo(dtype).eps for dtype in self._dtypes), default=0.0))
            self._write(
                terms={name: _size_of_terms(named[name], *t) for name, t in self._terms.items() if name in named}
            )
        if step == 1 and self._is_main:
            save_file({name: _plain(grad) for name, grad in named.items()}, self._folder / GRADIENTS)
        if self._plan.disturb:
            _disturb(list(named.values()), self._plan.disturb, step)

    def finished(self, step: int) -> None:
        """Kill this process, if this is the planned step and there is a checkpoint to resume from."""
        if step == self._plan.kill_at and self._is_last:
            deadline = time.monotonic() + _SAVE_LIMIT_S
            while not self._directory.names() and time.monotonic() < deadline:
                time.sleep(0.01)
            self._write(died_after=step)
            os.kill(os.getpid(), signal.SIGKILL)

    def ended(self, hashes: Sequence[str]) -> None:
        """Record the hashes of all ranks."""
        self._write(hashes=list(hashes))
        self._file.close()

    def _write(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")


def row_digests(batch: Any, num_rows: int) -> list[str] | None:
    """Return a digest for each row of a batch; None where no tensor has the batch's rows."""
    columns = [t.detach().cpu().contiguous() for t in nested_tensors(batch) if t.dim() and t.shape[0] == num_rows]
    if not columns:
        return None
    hashes = [hashlib.blake2b(digest_size=8) for _ in range(num_rows)]
    for column in columns:
        rows = column.reshape(num_rows, -1)
        raw = rows.view(torch.uint8).numpy() if rows.numel() else rows.numpy()
        for digest, row in zip(hashes, raw, strict=True):
            digest.update(row.tobytes())
    return [digest.hexdigest() for digest in hashes]


def _size_of_terms(grad: torch.Tensor, total: torch.Tensor, sizes: torch.Tensor) -> float:
    """Return the sum of the absolute values of the terms of a gradient, in its units: it may have been scaled since."""
    largest = float(total.abs().max())
    return float(sizes.max()) * float(grad.abs().max()) / largest if largest else 0.0


def _plain(grad: torch.Tensor) -> torch.Tensor:
    return grad.detach().to("cpu", copy=True).to_dense().contiguous()


def _disturb(grads: list[torch.Tensor], roundings: float, step: int) -> None:
    """Add noise as large as rounding errors may be: relative to each tensor, and a little relative to the largest."""
    largest = max((float(grad.abs().max()) for grad in grads if grad.numel()), default=0.0)
    generator = torch.Generator().manual_seed(step)
    for grad in grads:
        if grad.numel() and not grad.is_sparse:
            size = torch.finfo(grad.dtype).eps * (roundings * float(grad.abs().max()) + largest)
            noise = torch.rand(grad.shape, generator=generator, dtype=torch.float64) * 2 - 1
            grad.add_((noise * size).to(grad))
