"""On one machine, nothing listens where other machines could reach it."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from commands import TESTS, descendants, start, steps_in, wait_for

_LISTENS = "0A"


def listening(pids: set[int]) -> set[str]:
    """Return the addresses that processes listen on, as the kernel knows them."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            inodes.add(os.readlink(fd))
    addresses = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                addresses.add(socket.inet_ntop(family, address))
    return addresses


@pytest.mark.parametrize("comm", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_one_machine_listens_on_its_loopback_only(tmp_path: Path, comm: str) -> None:
    task, run_dir = str(TESTS / "faults" / "slow_task.py"), tmp_path / "run"
    words = ["train", task, "-n", "2", "--steps", "500", "pause_s=0.1", "--comm", comm, "--run-dir", str(run_dir)]
    process = start("instep", *words)
    try:
        wait_for(lambda: len(steps_in(run_dir)) > 2, timeout_s=50)
        assert listening({process.pid, *descendants(process.pid)}) == {"127.0.0.1"}
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
