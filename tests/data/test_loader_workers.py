"""The processes that load samples: how long they live, and how their errors arrive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from loading import N, Squares, load, make


class WhoReads(Squares):
    def __getitem__(self, index: int) -> Any:
        return os.getpid(), torch.get_num_threads()


def readers(batches: Any) -> set[int]:
    return {int(pid) for batch in batches for part in batch.parts for pid in part.batch[0]}


def test_the_same_workers_serve_every_reading_and_end_with_the_loader() -> None:
    loader = make(WhoReads(), workers=2)
    steps = loader.steps(0, 10)
    first = [next(steps) for _ in range(3)]  # left in the middle
    pids = readers(first)
    for start in (3, 7):
        batches = list(loader.steps(start, start + 6))
        assert [batch.step for batch in batches] == list(range(start, start + 6))
        pids |= readers(batches)
        assert all((part.batch[1] == 1).all() for batch in batches for part in batch.parts)
    assert len(pids) == 2
    assert os.getpid() not in pids
    loader.source.close()
    assert not any(alive(pid) for pid in pids)


class TwoWordsError(Exception):
    """Cannot be rebuilt from its message, as torch's workers would try."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Failing(Squares):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "kind"), [(KeyError("no such key"), KeyError), (OSError(2, "gone"), FileNotFoundError)]
)
def test_a_failing_sample_is_named_and_its_exception_is_the_original(
    workers: int, error: Exception, kind: type
) -> None:
    with pytest.raises(kind) as caught:
        load(Failing(error), workers=workers)
    assert caught.value.args == error.args
    assert any("while reading sample 17 of the dataset in epoch 0" in note for note in caught.value.__notes__)


def test_an_exception_that_cannot_travel_still_arrives() -> None:
    with pytest.raises(RuntimeError, match="TwoWordsError: two words") as caught:
        load(Failing(TwoWordsError("two", "words")), workers=1)
    notes = "\n".join(caught.value.__notes__)
    assert "sample 17" in notes
    assert "raise self.error" in notes


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_do_not_stack_say_what_to_do(workers: int) -> None:
    ragged = [(torch.zeros(k + 1), k) for k in range(N)]
    with pytest.raises(RuntimeError, match="equal size") as caught:
        load(ragged, workers=workers)
    assert any("collate(samples)" in note for note in caught.value.__notes__)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_workers_end_soon_after_a_killed_parent() -> None:
    script = """
        import os, time, torch
        from instep.data.loader import LoadOptions, TrainLoader
        from instep.data.batch_plan import BatchPlan
        from instep.data.order import SampleOrder
        class WhoReads:
            def __len__(self): return 8
            def __getitem__(self, index): return os.getpid()
        loader = TrainLoader(WhoReads(), BatchPlan(8, 4), SampleOrder(0, 8), LoadOptions(workers=2, seed=0))
        steps = loader.steps(0, 10**6)
        print(*{int(next(steps).parts[0].batch[0]) for _ in range(4)}, flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    deadline = time.monotonic() + 4
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
