"""One time for all machines of a job, and a sign of life: see [Note: One time for all machines] in clocks.py.

    roll/clock/2       how far the clock of machine 2 is ahead, and the doubt about that
    roll/beat/2        a number that grows for as long as it lives; roll/left/2: it has left in order
    roll/time          how many talks about the time were asked for
    roll/time/7/3/ping, pong      round 3 of the 7th talk

Room: one thread of the launching process, with a connection of its own to the board: a board that does not answer any
more keeps nobody else waiting. Ranks: none. Issues no collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from instep.core.clock import now_ns
from instep.core.errors import FailureRecord
from instep.launch.machines.board import Board
from instep.launch.machines.clocks import Offset, Round, estimate_offset

_POLL_S = 0.05
_BEAT_S = 0.5
_AGAIN_S = 600.0
"""A clock may be set right, or drift: so long an offset is taken for true."""
_ROUNDS = 7
_TALK_S = 3.0
"""How long one answer may take."""


class Timekeeper:
    """Tells the time, or asks for it."""

    def __init__(self, board: Board, number: int, clock: Callable[[], int] = now_ns) -> None:
        self.offset = Offset()
        self._number = number
        self._clock = clock
        self._board = board
        self._is_asked = board.is_host or (not board.has_host and number == 0)
        self._answered = self._beats = 0
        self._beat_due_s = self._ask_due_s = 0.0
        self._ending = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[Timekeeper]:
        """Keep the time for as long as the block lasts."""
        thread = threading.Thread(target=self._run, name="instep-time", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ending.set()
            thread.join(_TALK_S)

    def corrected(self, failures: Sequence[FailureRecord]) -> list[FailureRecord]:
        """Put failures that were dated here into the time of all machines."""
        offset = self.offset
        return [
            dataclasses.replace(record, time_ns=record.time_ns - offset.ahead_ns, doubt_ns=offset.doubt_ns)
            for record in failures
        ]

    def _run(self) -> None:
        # A board that is gone: its host has ended, which whoever works with it finds out in other ways.
        with contextlib.suppress(RuntimeError):
            self._board = self._board.line(_TALK_S)
            while True:
                self._beat()
                self._answer()
                self._ask()
                if self._ending.wait(_POLL_S):
                    self._board.post(f"roll/left/{self._number}", True)
                    return

    def _beat(self) -> None:
        if time.monotonic() >= self._beat_due_s:
            self._beats += 1
            self._board.post(f"roll/beat/{self._number}", self._beats)
            self._beat_due_s = time.monotonic() + _BEAT_S

    def _answer(self) -> None:
        """Tell the time to whoever has asked for it."""
        while self._is_asked and self._answered < self._board.add("roll/time", 0):
            self._answered += 1
            with contextlib.suppress(RuntimeError):  # whoever asked has gone in the middle of it
                for number in range(_ROUNDS):
                    self._board.wait(f"roll/time/{self._answered}/{number}/ping")
                    self._board.post(f"roll/time/{self._answered}/{number}/pong", self._clock())

    def _ask(self) -> None:
        """Find out how far this machine's clock is ahead; if nobody answers, it stays as it was."""
        if time.monotonic() < self._ask_due_s:
            return
        self._ask_due_s = time.monotonic() + _AGAIN_S
        if not self._is_asked:
            with contextlib.suppress(RuntimeError):
                self.offset = self._talk()
        self._board.post(f"roll/clock/{self._number}", dataclasses.asdict(self.offset))

    def _talk(self) -> Offset:
        talk, rounds = self._board.add("roll/time"), []
        for number in range(_ROUNDS):
            sent_ns = self._clock()
            self._board.post(f"roll/time/{talk}/{number}/ping", True)
            answered_ns = int(self._board.wait(f"roll/time/{talk}/{number}/pong"))
            rounds.append(Round(sent_ns, answered_ns, self._clock()))
        for number in range(_ROUNDS):  # a job may run for months
            self._board.drop(f"roll/time/{talk}/{number}/ping")
            self._board.drop(f"roll/time/{talk}/{number}/pong")
        return estimate_offset(rounds)
