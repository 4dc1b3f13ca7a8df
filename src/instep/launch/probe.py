"""Try whether processes on this machine really can work together: start two and let them add up.

Room: torch for the tensor that is added up; all else through `launch` and World.
"""

from __future__ import annotations

import datetime
import io
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from instep.core.errors import EnvironmentFailed, InstepError
from instep.core.spec import LaunchSpec
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.world.lane import engine
from instep.world.world import World, place_here

Backend = Literal["gloo", "nccl", "shared-memory"]

PROCESSES = 2
_TIMEOUT = datetime.timedelta(seconds=30)
_NUMBERS = 1 << 18  # 1 MiB of float32
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What came of it."""

    backend: str
    error: str = ""
    """Empty when the sum was right."""
    launch_s: float = 0.0
    """From the call until both processes were done."""
    sum_s: float = 0.0
    """For one all-reduce of 1 MiB."""
    uncompiled: str = ""
    """Of shared memory: why its innermost loops are in Python, if they are."""


def probe(backend: Backend) -> ProbeResult:
    """Start two processes, as a training would, and let them all-reduce over a backend."""
    begun = time.monotonic()
    silent = io.StringIO()
    try:
        with tempfile.TemporaryDirectory(prefix="instep-probe-") as folder:
            spec = LaunchSpec(processes=PROCESSES)
            found = launch(LaunchJob(add_up, (backend,), spec, LogPlan(Path(folder)), stdout=silent, stderr=silent))
    except (InstepError, OSError) as error:
        return ProbeResult(backend=backend, error=str(error))
    found_engine = engine.find()
    return ProbeResult(
        backend=backend,
        launch_s=time.monotonic() - begun,
        sum_s=max(found.values()),
        uncompiled=found_engine if backend == "shared-memory" and isinstance(found_engine, str) else "",
    )


def add_up(attempt: int, backend: Backend) -> float:
    """Be one of the two: add up, check the sum, give the seconds it took. Called on all ranks."""
    del attempt
    place = place_here()
    comm = "auto" if backend == "nccl" else backend
    if backend != "nccl":
        place = replace(place, device="cpu")
    with World.join(place, timeout=_TIMEOUT, comm=comm) as world:
        if backend == "nccl" and world.backend != backend:
            raise EnvironmentFailed(f"these processes would meet over {world.backend}, not over {backend}.")
        seconds = []
        for _ in range(_ROUNDS):
            numbers = torch.full((_NUMBERS,), float(world.rank + 1), device=world.device)
            begun = time.monotonic()
            total = world.all_reduce(numbers)
            found = (float(total.min()), float(total.max()))  # waits for a GPU
            seconds.append(time.monotonic() - begun)
            expected = world.world_size * (world.world_size + 1) / 2
            if found != (expected, expected):
                raise EnvironmentFailed(f"the sum came out as {found[0]:g}..{found[1]:g} instead of {expected:g}.")
        return min(seconds)
