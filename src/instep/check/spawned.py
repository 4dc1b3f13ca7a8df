"""Watch the ranks that a script starts itself, by torch.multiprocessing.spawn.

Ranks: one, which starts the others; each of those runs `_WatchedChild`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.check.observe.agreement import create_agreement
from instep.check.watched import WatchedRun, watch_call


def watch_spawned_ranks(run: WatchedRun) -> None:
    """Make torch.multiprocessing.spawn start ranks that write down what they do."""
    import torch.multiprocessing

    start: Callable[..., Any] = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    signature = inspect.signature(start)

    @functools.wraps(start)
    def spawn(fn: Callable[..., object], *arguments: Any, **options: Any) -> Any:
        world_size = int(signature.bind(fn, *arguments, **options).arguments.get("nprocs", 1))
        create_agreement(Path(run.folder) / "agreement-spawned", world_size)
        child = dataclasses.replace(run, agreement="agreement-spawned")
        return start(_WatchedChild(fn, child, world_size), *arguments, **options)

    setattr(torch.multiprocessing, "spawn", spawn)  # noqa: B010 - torch does not export it


@dataclass(frozen=True)
class _WatchedChild:
    """The function of a process that the script spawns: its index is its rank."""

    function: Callable[..., object]
    run: WatchedRun
    world_size: int

    def __call__(self, index: int, *arguments: object) -> None:
        watch_call(self.run, index, self.world_size, lambda: self.function(index, *arguments))
