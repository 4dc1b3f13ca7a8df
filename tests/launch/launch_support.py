"""What several tests of the launcher need."""

import contextlib
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def is_alive(pid):
    """Say whether a process runs; a zombie, which nobody here may be able to reap, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def hosting(port, job="a"):
    """Host a board in a process of its own, which may be stopped or killed."""
    plan = f"BoardPlan('127.0.0.1', {port}, {job!r}, True)"
    code = f"""
import time
from instep.launch.machines.board import Board, BoardPlan
board = Board.open({plan}, print)
print("here", flush=True)
time.sleep(120)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout.readline() == "here\n"
            yield host
        finally:
            host.kill()
