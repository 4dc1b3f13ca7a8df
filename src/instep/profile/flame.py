"""A sampled flame graph of one process, by py-spy, where it is installed.

[Note: Sampling after the trace]
py-spy takes a second to start, and torch's profiler makes the host slower. So the steps after the profiled ones are
sampled, for a few seconds: what the host does when nobody records operations. Nobody waits for it but the end of the
run, which ends it early.

Ranks: those that are profiled.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
from pathlib import Path

SUFFIX, LOG_SUFFIX = ".flame.svg", ".flame.log"
SECONDS = 5
_RATE = 100
_END_S = 10.0
"""How long it may take to write the graph."""
_PR_SET_PTRACER = 0x59616D61
MISSING = "No flame graph: py-spy is not installed. pip install 'instep[profile]'"


def find_py_spy() -> str | None:
    """Return the path of py-spy; None: it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def forget_flame(folder: Path, rank: int) -> None:
    """Remove the flame graph of an earlier profile."""
    for name in _names(rank):
        (folder / name).unlink(missing_ok=True)


def collect_flame(folder: Path, rank: int) -> str:
    """Rename the graph that py-spy has written; return why there is none, or nothing.

    After a rank was killed this is done for it: py-spy writes its graph when the process that it samples is gone.
    """
    graph, log, part = (folder / name for name in _names(rank))
    if part.is_file() and part.stat().st_size:
        part.replace(graph)
    part.unlink(missing_ok=True)
    if graph.is_file() or not log.is_file():
        log.unlink(missing_ok=True)
        return ""
    return describe_failure(log.read_text(errors="replace"))


def _names(rank: int) -> tuple[str, str, str]:
    """Return the names of a rank's graph, of what py-spy said, and of the graph until it is complete."""
    return f"rank-{rank}{SUFFIX}", f"rank-{rank}{LOG_SUFFIX}", f".rank-{rank}{SUFFIX}"


class FlameGraph:
    """py-spy at work on a process."""

    def __init__(self, program: str, pid: int, folder: Path, rank: int) -> None:
        """Start to sample; `pid` is this process."""
        self._folder, self._rank = folder, rank
        _, log_name, part_name = _names(rank)
        command = [program, "record", "--pid", str(pid), "--output", str(folder / part_name), "--format", "flamegraph"]
        # Without pausing the process: its collectives would make all other ranks wait.
        command += ["--duration", str(SECONDS), "--rate", str(_RATE), "--nonblocking"]
        with (folder / log_name).open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        _allow_tracing(self._process.pid)

    def finish(self) -> None:
        """End it, if it still samples, and keep its graph; without one, keep what it said."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # it writes what it has
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        collect_flame(self._folder, self._rank)


def describe_failure(log: str) -> str:
    """Return in one sentence why there is no flame graph, from what py-spy said."""
    if "permission denied" in log.lower() or "operation not permitted" in log.lower():
        return (
            "No flame graph: py-spy may not read this process. It needs the permission to trace: as root, in a "
            "container with SYS_PTRACE, or with /proc/sys/kernel/yama/ptrace_scope at most 1."
        )
    said = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    if not said or "sampling process" in said.lower() or "no stack counts" in said.lower():
        return "No flame graph: the run ended before py-spy had samples of it. Profile earlier steps, or train longer."
    return f"No flame graph: py-spy said: {said[:200]}"


def _allow_tracing(pid: int) -> None:
    """Allow a child to read this process, where the kernel lets only parents read their children (Yama)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
