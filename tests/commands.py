"""Run the installed command, as a person would, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import command_server
import patience
from instep.events.read import read_events

BIN = Path(sys.executable).parent
TESTS = Path(__file__).parent
ROOT = TESTS.parent


def start(*words: str, fresh: bool = False, **more: Any) -> subprocess.Popen[str]:
    """Start a command of the environment (instep, torchrun, python) in the background.

    `instep` is forked from a process that has imported torch, see command_server.py, unless it must be `fresh`.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTEST_"))}
    cwd, env = more.pop("cwd", ROOT), inherited | more.pop("env", {})
    is_forked = not fresh and command_server.can_serve(words, env, more)
    return (command_server.ForkedCommand if is_forked else patience.Popen)(
        [str(BIN / words[0]), *words[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=env,
        start_new_session=True,
        **more,
    )


def run(*words: str, timeout_s: float = 50, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    process = start(*words, **more)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()  # else its pipes are closed in another test, which fails by the warning
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Read the Result that --json printed."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def wait_for(condition: Any, timeout_s: float = 20) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s * patience.PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def steps_in(run_dir: Path) -> list[dict[str, Any]]:
    """The step events of a run."""
    return [e for e in read_events(run_dir) if e["event"] == "step"] if run_dir.exists() else []


def pids_of(run_dir: Path, world_size: int) -> list[int]:
    """The workers' process numbers, from the newest start events."""
    pids = []
    for rank in range(world_size):
        starts = [e for e in read_events(run_dir, rank) if e["event"] == "start"]
        if starts:
            pids.append(starts[-1]["pid"])
    return pids


def is_alive(pid: int) -> bool:
    """Return whether a process still runs; one that ended and is not fetched yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    pids = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            pids += [child, *descendants(child)]
    return pids
