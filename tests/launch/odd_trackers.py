"""Trackers that fail or hang, for the processes that tests start."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from instep.monitor.incidents import Incident
from instep.monitor.tracking.tracker import Outcome, Row, TrackedRun, Tracker


class Odd(Tracker):
    """Does nothing; the subclasses do something wrong."""

    def __init__(self, run: TrackedRun) -> None:
        self.where, self.identity = str(run.path), {}

    def send(self, rows: Sequence[Row]) -> None:
        pass

    def report(self, incidents: Sequence[Incident], num_reported: int) -> None:
        pass

    def finish(self, outcome: Outcome) -> None:
        pass


class Failing(Odd):
    def send(self, rows: Sequence[Row]) -> None:
        raise ConnectionError("no route to the server.")


class Hanging(Odd):
    def send(self, rows: Sequence[Row]) -> None:
        time.sleep(1000)


class HoldingTheInterpreter(Odd):
    """Hangs in C code that never lets another thread run."""

    def send(self, rows: Sequence[Row]) -> None:
        (2**31) ** (2**31)


class Leaving(Odd):
    def send(self, rows: Sequence[Row]) -> None:
        os._exit(7)


class SlowToFinish(Odd):
    def finish(self, outcome: Any) -> None:
        time.sleep(1000)
