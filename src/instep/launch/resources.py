"""The resources of this node, as this process sees them: cores, memory, ports, disk space."""

import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from instep.world.device import ACCELERATORS
from instep.world.shared_memory import SHARED_MEMORY

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """The resources that this process sees. None: unknown."""

    cores: int
    """Cores that this process may run on."""
    quota_cores: float | None = None
    """CPU time that the container may use, in cores."""
    memory_bytes: int | None = None
    """All memory, or the container's limit."""
    available_bytes: int | None = None
    shared_memory_bytes: int | None = None
    """Free space in /dev/shm."""
    accelerator: str = ""
    """The type of accelerator that the kernel knows, whether or not torch can use it."""
    omp_num_threads: str | None = None


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder to write to."""

    path: str
    free_bytes: int = 0
    error: str = ""
    """Why nothing can be written there; empty if something can."""


def node_resources(environ: Mapping[str, str] = os.environ) -> NodeResources:
    """Return the resources of this node."""
    limit, memory = _text(_CGROUP / "memory.max").strip(), psutil.virtual_memory()
    return NodeResources(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota_cores=parse_cpu_max(_text(_CGROUP / "cpu.max")),
        memory_bytes=min(memory.total, int(limit)) if limit.isdigit() else memory.total,
        available_bytes=memory.available,
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        accelerator=next((kind for kind, accelerator in ACCELERATORS.items() if accelerator.is_installed()), ""),
        omp_num_threads=environ.get("OMP_NUM_THREADS"),
    )


def available_memory_bytes() -> int:
    """Return how much memory new processes may take: what is free on this node, and within the container's limit."""
    available = int(psutil.virtual_memory().available)
    limit, current = (_text(_CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and current.isdigit():
        available = min(available, max(0, int(limit) - int(current)))
    return available


def check_folder(path: Path) -> Folder:
    """Return whether a file can be written in a folder, or where the folder would be made."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"instep")
            file.flush()
        return Folder(path=str(path), free_bytes=shutil.disk_usage(existing).free)
    except OSError as error:
        return Folder(path=str(path), error=f"{existing}: {error.strerror or error}")


def check_temporary_folder() -> Folder:
    """Return whether launches can write their scratch folders."""
    try:
        return check_folder(Path(tempfile.gettempdir()))
    except OSError as error:
        return Folder(path="the temporary folder", error=str(error))


def free_ports(count: int) -> tuple[int, ...]:
    """Bind free ports of the loopback, all at once, release them and return them; raise OSError if that fails."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
        return tuple(listener.getsockname()[1] for listener in sockets)


def parse_cpu_max(text: str) -> float | None:
    """Parse a cgroup's `cpu.max`: `150000 100000` is one and a half cores, `max 100000` no limit."""
    quota, _, period = text.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or not readable
        return ""
