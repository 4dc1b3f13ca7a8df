"""Set up every test: one thread, as the ranks have; a seed; a turn on the machine; a Ctrl-C that is received."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import patience
import rings

torch.set_num_threads(1)
# Who starts the tests in the background of a shell has them ignore it, and so would every command that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

_TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files for workers that take them in turn: long ones first, those that wait among those that compute.

    Tests that run alone come first of all: later, the other workers would wait for the one with the longest test.
    """
    for item in items:
        _be_patient(item)
    items.sort(key=lambda item: (item.path, not _runs_alone(item)))
    files = [list(group) for _, group in itertools.groupby(items, key=lambda item: item.path)]
    alone = [file for file in files if _runs_alone(file[0])]
    waiting = [file for file in files if file not in alone and "clusters" in file[0].path.parts]
    computing = sorted((file for file in files if file not in alone + waiting), key=_place)
    items[:] = [item for file in [*alone, *_spread(waiting, computing)] for item in file]


def _be_patient(item: pytest.Item) -> None:
    mark = item.get_closest_marker("timeout")
    limit_s = mark.args[0] if mark else float(item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(limit_s * patience.PATIENCE), append=False)


def _runs_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


_LONG = ("faults", "verify", "launch", "cli", "parity", "parallel", "train", "world", "data")


def _place(file: list[pytest.Item]) -> int:
    folder = file[0].path.relative_to(_TESTS).parts[0]
    return _LONG.index(folder) if folder in _LONG else len(_LONG)


def _spread(few: list[Any], many: list[Any]) -> list[Any]:
    """Put few among many, evenly over their first half."""
    every = max(1, len(many) // 2 // max(1, len(few)))
    merged = []
    for number, file in enumerate(many):
        if number % every == 0 and few:
            merged.append(few.pop(0))
        merged.append(file)
    return merged + few


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Return a test the same random tensors in every run, whichever tests its worker ran before."""
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test that is marked `alone` while no other worker runs one; outside of the test's timeout."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with _turn(_runs_alone(item)):
        return (yield)


@contextlib.contextmanager
def _turn(alone: bool) -> Iterator[None]:
    # Locks on files that are there anyway: none is left behind by workers that were ended.
    with Path(__file__).open() as gate, Path(rings.__file__).open() as turn:
        fcntl.flock(gate, fcntl.LOCK_EX)  # else the others' tests, one after the other, would leave no moment free
        fcntl.flock(turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Print, as the last line, which rings of tests this machine cannot run."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    reports = reporter.stats.get("skipped", [])
    line = rings.summary(report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple))
    if line:
        reporter.write_line(line)
