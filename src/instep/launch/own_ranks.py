"""Ranks that a script starts itself (torch.multiprocessing.spawn): where they hang, and which of them failed first.

torch raises the error of the process that ended first, which may only have lost its peer. Each process therefore notes
its own failure, and the cause comes first, as among ranks that the launcher starts ([Note: The first failure]).

Ranks: one, which has started the others.
"""

import dataclasses
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from instep.core.errors import FailureRecord, SpecError
from instep.guard.stacks import register_stacks, stacks_file
from instep.launch.failures import failure_of_exception, order_failures


def refuse_spawn() -> None:
    """Make torch.multiprocessing.spawn raise: this script is one of several ranks already."""

    def spawn(*_: object, **__: object) -> None:
        size = os.environ["WORLD_SIZE"]
        raise SpecError(
            f"the script starts its own ranks (torch.multiprocessing.spawn), and instep has started {size} of it "
            "already. Run it with -n 1, or leave spawn out and call its function: RANK and WORLD_SIZE are set."
        )

    _replace(spawn)


def watch_spawned() -> None:
    """Record where the processes of torch.multiprocessing.spawn are, and how they failed."""
    import torch.multiprocessing
    from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException

    start = torch.multiprocessing.spawn  # type: ignore[attr-defined]

    @functools.wraps(start)
    def spawn(fn: Callable[..., object], *arguments: object, **options: object) -> object:
        with tempfile.TemporaryDirectory(prefix="instep-spawned-") as folder:
            try:
                return start(_Spawned(fn, stacks_file(), Path(folder)), *arguments, **options)
            except ProcessException as error:
                failures = order_failures(_load(path) for path in Path(folder).glob("*.json"))
                if not failures:  # it was killed, or has left
                    raise
                first = failures[0]
                text = f"\n\n-- Process {first.rank} terminated with the following error:\n{first.traceback}"
                raise ProcessRaisedException(text, first.rank, error.error_pid) from None

    _replace(spawn)


@dataclass(frozen=True)
class _Spawned:
    """The function of a process that the script spawns."""

    function: Callable[..., object]
    stacks: Path | None
    notes: Path

    def __call__(self, index: int, *arguments: object) -> None:
        if self.stacks is not None:
            register_stacks(self.stacks)
        try:
            self.function(index, *arguments)
        except Exception as error:
            record = failure_of_exception(error, index, time.time_ns(), "")
            if self.notes.is_dir():  # with join=False, spawn has returned
                (self.notes / f"{index}.json").write_text(json.dumps(dataclasses.asdict(record)))
            raise


def _load(path: Path) -> FailureRecord:
    return FailureRecord(**json.loads(path.read_text()))


def _replace(spawn: Callable[..., object]) -> None:
    import torch.multiprocessing

    setattr(torch.multiprocessing, "spawn", spawn)  # noqa: B010 - torch does not export it
