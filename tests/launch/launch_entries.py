"""Entries that the tests launch; workers import this file by its name."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def rank() -> int:
    return int(os.environ["RANK"])


def greet(attempt, word):
    print(f"{word} on stdout")
    print(f"{word} on stderr", file=sys.stderr)
    for percent in range(0, 101, 10):
        print(f"\r{percent}%", end="")
    print()
    print("no line end", end="")
    return {"rank": rank(), "threads": torch.get_num_threads(), "cwd": os.getcwd(), "attempt": attempt}


def reduce(attempt):
    dist.init_process_group("gloo")
    value = torch.tensor([float(rank())])
    dist.all_reduce(value)
    return value.item()


def wrong_blame(attempt):
    """Rank 1 raises and, still cleaning up, closes its connections; rank 0 is the first to be gone."""
    dist.init_process_group("gloo")
    dist.barrier()
    try:
        if rank() == 1:
            raise KeyError("the cause")
        dist.all_reduce(torch.ones(4))
    finally:
        if rank() == 1:
            dist.destroy_process_group()
            time.sleep(0.5)


def stubborn(attempt, pid_file):
    """Two ranks handle SIGTERM in Python and wait for each other; rank 1 leaves a helper and raises."""
    dist.init_process_group("gloo")
    signal.signal(signal.SIGTERM, lambda *_: None)
    dist.barrier()
    if rank() == 1:
        Path(pid_file).write_text(str(subprocess.Popen(["sleep", "100"]).pid))
        raise ValueError("on purpose")
    dist.recv(torch.ones(1), src=2 - rank())


def fails_until(attempt, enough):
    """Kill rank 1 in the middle of a collective, in the first `enough` attempts."""
    dist.init_process_group("gloo")
    if rank() == 1 and attempt < enough:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def same_error(attempt):
    if rank() == 1:
        raise ValueError("always the same")
    time.sleep(20)


def bad_spec(attempt):
    from instep.core.errors import SpecError

    raise SpecError("batch_size=1 cannot be.")
