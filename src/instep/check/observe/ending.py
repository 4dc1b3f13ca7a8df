"""End a script that was watched for long enough.

A rank leaves at once, from wherever it is: no `finally` of the script runs, no save after the training, no handler that
would swallow a SystemExit. What it has printed is flushed, and the processes that it has started are ended.

Ranks: all. Issues no collectives.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from instep.check.observe.agreement import Agreement, RankState
from instep.check.plan import WatchPlan
from instep.core.errors import EXIT_DONE
from instep.guard.processes import descendants_of, kill
from instep.guard.pulse import start_ticks_of

_POLL_S, _GUARD_POLL_S = 0.01, 0.25
_PATIENCE_S = 5.0
"""How long no rank may move, at least, before those that wait for the others release all."""
_TIMES_STEP = 5.0
_RELEASE_S = 2.0
"""How long released ranks may take to leave."""


class Ending:
    """Decides when this rank leaves its script, together with the other ranks ([Note: Leaving together])."""

    def __init__(self, plan: WatchPlan, agreement: Agreement, write_end: Callable[[str], None]) -> None:
        self._plan, self._agreement, self._write_end = plan, agreement, write_end
        self.epochs = 0
        """How often the loader that feeds the training has begun."""
        self.evaluated = False
        self._pid = os.getpid()
        self._begun_s = self._stepped_s = time.monotonic()
        """When the script began or, once it has made one, its first step was made; and when its last one was."""
        self._has_stepped = False
        self._longest_step_s = 0.0
        self._leaving = threading.Lock()

    def guard(self) -> None:
        """Start the thread that ends this rank where no step does: time is up, or the other ranks have left."""
        threading.Thread(target=self._run_guard, name="instep-check", daemon=True).start()

    def step_made(self, step: int) -> None:
        """Note an optimizer step; do not return from the last one."""
        if os.getpid() != self._pid:  # a process that the script has forked is no rank
            return
        now = time.monotonic()
        if self._has_stepped:
            self._longest_step_s = max(self._longest_step_s, now - self._stepped_s)
        else:
            self._has_stepped, self._begun_s = True, now
        self._stepped_s = now
        if self._agreement.advance(step, self.epochs, self.evaluated, now - self._begun_s):
            self._agreement.set_state(RankState.WAITING)
            self._wait_for_others()
            self._leave(self._why())

    def script_ended(self) -> None:
        """Note that the script has ended by itself; one that failed because the other ranks have left did not."""
        if os.getpid() != self._pid:
            return
        if self._agreement.is_released:
            self._leave("the other ranks have left")
        self._agreement.set_state(RankState.ENDED)

    def _wait_for_others(self) -> None:
        patience_s = max(_PATIENCE_S, _TIMES_STEP * self._longest_step_s)
        steps, until_s = self._agreement.steps(), time.monotonic() + patience_s
        while not (self._agreement.all_there or self._agreement.is_released or time.monotonic() > until_s):
            time.sleep(_POLL_S)
            if (now := self._agreement.steps()) != steps:
                steps, until_s = now, time.monotonic() + patience_s
        if self._agreement.all_there:
            return
        self._agreement.release()
        # They need a moment; without this rank, a collective that they wait in fails, and looks like a crash.
        until_s = time.monotonic() + _RELEASE_S
        while not self._agreement.all_there and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def _run_guard(self) -> None:
        while not self._agreement.is_released:
            time.sleep(_GUARD_POLL_S)
            over_s = self._over_s()
            if over_s > 0:
                self._agreement.ask()
            if over_s > max(_PATIENCE_S, 2 * self._longest_step_s):
                self._agreement.release()
        self._leave(self._why() or "the other ranks have left")

    def _why(self) -> str:
        """Return why a rank leaves before enough was seen; empty: enough was seen."""
        return "time was up" if self._over_s() > 0 else ""

    def _over_s(self) -> float:
        return time.monotonic() - self._begun_s - self._plan.time_limit_s(self._has_stepped)

    def _leave(self, why: str) -> NoReturn:
        self._leaving.acquire()  # the main thread and the guard may come here at once; the first one ends both
        self._write_end(why)
        self._agreement.set_state(RankState.ENDED)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced by the script
                stream.flush()
        for pid in descendants_of(os.getpid()):
            kill(pid, start_ticks_of(pid) or 0)
        os._exit(EXIT_DONE)
