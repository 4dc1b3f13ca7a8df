"""What this machine offers to the processes of a job: cores, memory, ports, room on disk.

Room: reads the environment and the kernel's own files; starts nothing, changes nothing, imports no torch.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from instep.world.device import ACCELERATORS

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where it is, not where we write
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, as one process on it sees it. None: not known here."""

    cores: int
    """Cores that this process may run on."""
    quota_cores: float | None = None
    """Cores' worth of time that its container is given."""
    memory_bytes: int | None = None
    """All memory, or the container's share of it."""
    available_bytes: int | None = None
    shared_memory_bytes: int | None = None
    """Free room in /dev/shm."""
    accelerator: str = ""
    """The type of accelerator that the kernel knows, whether or not torch can use it."""
    omp_num_threads: str | None = None


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A place that files are written to."""

    path: str
    free_bytes: int = 0
    error: str = ""
    """Why nothing can be written there; empty when something can."""


def look_at_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """Find out what there is."""
    limit = _first_number(_CGROUP / "memory.max")
    total, available = _meminfo("MemTotal"), _meminfo("MemAvailable")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        cores=cores,
        quota_cores=quota_of(_text(_CGROUP / "cpu.max")),
        memory_bytes=min((n for n in (total, limit) if n is not None), default=None),
        available_bytes=available,
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        accelerator=next((kind for kind, accelerator in ACCELERATORS.items() if accelerator.is_installed()), ""),
        omp_num_threads=environ.get("OMP_NUM_THREADS"),
    )


def look_at_folder(path: Path) -> Folder:
    """Find out whether a file can be written in a folder, or where the folder would be made."""
    there = path
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"instep")
            file.flush()
        return Folder(path=str(path), free_bytes=shutil.disk_usage(there).free)
    except OSError as error:
        return Folder(path=str(path), error=f"{there}: {error.strerror or error}")


def scratch_folder() -> Folder:
    """Find out where launches keep what their processes tell each other."""
    try:
        return look_at_folder(Path(tempfile.gettempdir()))
    except OSError as error:
        return Folder(path="the temporary folder", error=str(error))


def free_ports(count: int) -> tuple[int, ...]:
    """Take free ports of the loopback, all at once, and let them go again; an OSError says why not."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
            each.listen()
        return tuple(each.getsockname()[1] for each in sockets)


def quota_of(cpu_max: str) -> float | None:
    """Read a container's `cpu.max`: `150000 100000` is one and a half cores, `max 100000` no limit."""
    quota, _, period = cpu_max.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _meminfo(name: str) -> int | None:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _first_number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not this kind of system, or not for us to read
        return ""
