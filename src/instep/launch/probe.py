"""Check whether processes on this node can communicate: launch two that all-reduce a tensor."""

import datetime
import io
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from instep.core.errors import EnvironmentFailed, InstepError
from instep.core.launch_spec import LaunchSpec
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.world.device import device_backends
from instep.world.lane import engine
from instep.world.world import World, place_here

PROCESSES = 2
_TIMEOUT = datetime.timedelta(seconds=30)
_NUMBERS = 1 << 18  # 1 MiB of float32
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The result of one probe."""

    backend: str
    error: str = ""
    """Empty if the sum was right."""
    launch_s: float = 0.0
    """From the call until both processes had ended."""
    sum_s: float = 0.0
    """The fastest all-reduce of 1 MiB."""
    uncompiled: str = ""
    """For shared memory: why its inner loops run in Python, if they do."""


def probe(backend: str) -> ProbeResult:
    """Launch two processes, as a training does, that all-reduce over a backend."""
    begun = time.monotonic()
    output = io.StringIO()
    try:
        with tempfile.TemporaryDirectory(prefix="instep-probe-") as folder:
            spec = LaunchSpec(processes=PROCESSES)
            seconds = launch(LaunchJob(add_up, (backend,), spec, LogPlan(Path(folder)), stdout=output, stderr=output))
    except (InstepError, OSError) as error:
        return ProbeResult(backend=backend, error=str(error))
    loops = engine.find()
    return ProbeResult(
        backend=backend,
        launch_s=time.monotonic() - begun,
        sum_s=max(seconds.values()),
        uncompiled=loops if backend == "shared-memory" and isinstance(loops, str) else "",
    )


def add_up(attempt: int, backend: str) -> float:
    """All-reduce a tensor, check the sum and return the seconds it took. Called on all ranks."""
    del attempt
    place = place_here()
    needs_device = backend in device_backends()
    comm = "auto" if needs_device else backend
    if not needs_device:
        place = replace(place, device="cpu")
    with World.join(place, timeout=_TIMEOUT, comm=comm) as world:
        if needs_device and world.backend != backend:
            raise EnvironmentFailed(f"the processes communicate over {world.backend}, not over {backend}.")
        seconds = []
        for _ in range(_ROUNDS):
            numbers = torch.full((_NUMBERS,), float(world.rank + 1), device=world.device)
            begun = time.monotonic()
            total = world.all_reduce(numbers)
            smallest, largest = float(total.min()), float(total.max())  # waits for a GPU
            seconds.append(time.monotonic() - begun)
            expected = world.world_size * (world.world_size + 1) / 2
            if (smallest, largest) != (expected, expected):
                raise EnvironmentFailed(f"the sum is {smallest:g}..{largest:g} instead of {expected:g}.")
        return min(seconds)
