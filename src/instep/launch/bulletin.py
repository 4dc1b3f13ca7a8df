"""What the machines of a job tell each other while it runs: the time, that they live, and what failed.

    card/2, packages/2        what machine 2 is (see agreement.py)
    clock/2                   how far its clock is ahead, and the doubt about that
    left/2, refused/2         it has left in order; it would not go on with the others
    beat/2                    a number that grows for as long as it lives
    time/asked                how many talks about the time were asked for; time/7/3/ping, pong: round 3 of the 7th
    failures/MEETING/2        what failed there in one meeting of the ranks, and whether its launching process has ended
    told/MEETING              how many launching processes know all of them

A meeting is one coming together of the ranks: elastic begins a new one with every restart, and whenever a machine comes
or goes. It is named by the address of its store, which no other meeting shares.

Room: one thread of the launching process, with a connection of its own to the board: a board that does not answer any
more keeps nobody else waiting. Ranks: none. Issues no collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from instep.core.clock import now_ns
from instep.core.errors import FailureRecord
from instep.guard.pulse import read_pulse
from instep.launch.agreement import Card, names_of
from instep.launch.board import Board
from instep.launch.clocks import Offset, Round, estimate_offset
from instep.launch.failures import order_failures
from instep.launch.scratch import Meeting, Scratch

_POLL_S = 0.1
_BEAT_S = 0.5
_ROUNDS = 7
_TALK_S = 3.0
"""How long one answer about the time may take."""
OTHERS_S = 2.0
"""How long the launching processes wait for each other's failures, and twice as long for a cause."""
_FAREWELL_S = 1.0
_MOST_TEXT = 20_000


class Bulletin:
    """Posts what happens on this machine, and reads what happened on the others."""

    def __init__(
        self,
        board: Board,
        number: int,
        scratch: Scratch,
        say: Callable[[str], object],
        restarts: int,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self._clock = clock
        self.number = number
        self.offset = Offset()
        self._board = board.line(_TALK_S)
        self._is_clock = board.is_host or (not board.has_host and number == 0)
        self._scratch, self._say, self._restarts = scratch, say, restarts
        self._meeting: Meeting | None = None
        self._posted: Any = None
        self._earlier: set[tuple[int, int]] = set()
        """Failures of earlier meetings, which elastic counted as the same attempt: rank and time."""
        self._served = self._beats = 0
        self._beat_due_s = 0.0
        self._ending = threading.Event()
        self._concluding = threading.Event()
        self._own: list[FailureRecord] | None = None
        self._all: list[FailureRecord] = []
        self._known = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[Bulletin]:
        """Post and answer for as long as the block lasts."""
        thread = threading.Thread(target=self._run, name="instep-bulletin", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ending.set()
            thread.join(_TALK_S)

    def conclude(self, own: Sequence[FailureRecord]) -> list[FailureRecord]:
        """Tell the others what failed here, hear what failed there, and give all of it, the first cause first.

        The same everywhere, and bounded: a machine that does not answer is not waited for.
        """
        self._own = [record for record in own if (record.rank, record.time_ns) not in self._earlier]
        self._concluding.set()
        self._known.wait(4 * OTHERS_S)
        return list(self._all) or order_failures(own)

    def elsewhere(self) -> list[FailureRecord]:
        """Give what failed in the last meeting where that began on another machine, and elastic only gave up here."""
        self._concluding.set()
        self._known.wait(4 * OTHERS_S)
        return list(self._all) if any(not record.consequence for record in self._all) else []

    def measure(self) -> None:
        """Find out how far this machine's clock is ahead. For the thread that has the board's connection."""
        if self._is_clock:
            return
        talk, rounds = self._board.add("time/asked"), []
        for number in range(_ROUNDS):
            sent = self._clock()
            self._board.post(f"time/{talk}/{number}/ping", 1)
            answered = self._board.wait(f"time/{talk}/{number}/pong")
            rounds.append(Round(sent, int(answered), self._clock()))
        self.offset = estimate_offset(rounds)

    def _run(self) -> None:
        # A board that is gone, or does not answer: its host has ended, and elastic will say so in its own way.
        with contextlib.suppress(RuntimeError), self._last_word():
            self._answer()
            with contextlib.suppress(RuntimeError):  # nobody told the time: this clock is taken for right
                self.measure()
            self._board.post(f"clock/{self.number}", dataclasses.asdict(self.offset))
            while not self._ending.wait(_POLL_S):
                self._answer()
                self._follow()
                if self._concluding.is_set() and not self._known.is_set():
                    self._conclude()
            self._leave()

    def _leave(self) -> None:
        """Say that this machine has left; the last to go is the one that the board goes with, if it can be."""
        self._board.post(f"left/{self.number}", True)
        until = time.monotonic() + _FAREWELL_S
        while self._is_clock and time.monotonic() < until:
            numbers = range(self._board.add("machines", 0))
            if all(self._board.read(f"left/{number}") is not None for number in numbers):
                return
            time.sleep(0.02)

    @contextlib.contextmanager
    def _last_word(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._known.set()  # nothing more will be known, whatever ended this

    def _answer(self) -> None:
        """Show that this machine lives; where its clock is the one that counts, tell the time to whoever asks."""
        if time.monotonic() >= self._beat_due_s:
            self._beats += 1
            self._board.post(f"beat/{self.number}", self._beats)
            self._beat_due_s = time.monotonic() + _BEAT_S
        while self._is_clock and self._served < self._board.add("time/asked", 0):
            self._served += 1
            with contextlib.suppress(RuntimeError):  # whoever asked has gone in the middle of it
                for number in range(_ROUNDS):
                    self._board.wait(f"time/{self._served}/{number}/ping")
                    self._board.post(f"time/{self._served}/{number}/pong", self._clock())

    def _follow(self) -> None:
        """Post what is new in this meeting; if it is another one, say why."""
        if self._meeting is not None:
            self._post(self._failures_of(self._meeting.attempt), ended=False)
        found = self._scratch.meeting(self._scratch.last_attempt())
        if found is None or (self._meeting is not None and found.name == self._meeting.name):
            return
        if self._meeting is not None:
            self._earlier |= {(r.rank, r.time_ns) for r in self._scratch.load_failures(self._meeting.attempt)}
            self._say(restart_line(self._gather(self._meeting), self._meeting, found, self._restarts))
        self._meeting, self._posted = found, None

    def _failures_of(self, attempt: int) -> list[FailureRecord]:
        found = self._scratch.load_failures(attempt)
        return [record for record in found if (record.rank, record.time_ns) not in self._earlier]

    def _post(self, failures: Sequence[FailureRecord], ended: bool) -> None:
        assert self._meeting is not None
        value = {"ended": ended, "failures": [dataclasses.asdict(self._dated(record)) for record in failures]}
        if value != self._posted and (failures or ended):
            self._board.post(f"failures/{self._meeting.name}/{self.number}", value)
            self._posted = value

    def _dated(self, record: FailureRecord) -> FailureRecord:
        """Put a record into the time of all machines, and say how far its rank had come."""
        assert self._meeting is not None
        beat = read_pulse(self._scratch.pulse(self._meeting.attempt, record.rank))
        return dataclasses.replace(
            record,
            time_ns=record.time_ns - self.offset.ahead_ns,
            doubt_ns=self.offset.doubt_ns,
            step=beat.step if beat is not None else None,
            traceback=record.traceback[-_MOST_TEXT:],
        )

    def _gather(self, meeting: Meeting) -> list[FailureRecord]:
        return order_failures(record for _, failures in self._read(meeting) for record in failures)

    def _read(self, meeting: Meeting) -> list[tuple[bool, list[FailureRecord]]]:
        """Give what each machine posted of a meeting: whether it has ended there, and its failures."""
        numbers = range(self._board.add("machines", 0))
        posted = {number: self._board.read(f"failures/{meeting.name}/{number}") for number in numbers}
        there = [n for n in numbers if posted[n] is not None or self._board.read(f"left/{n}") is None]
        cards = [Card.from_json(card) for card in (self._board.read(f"card/{n}") for n in there) if card is not None]
        names = names_of(cards)
        found = []
        for number, value in posted.items():
            if value is not None:
                records = [FailureRecord(**{**each, "host": names.get(number, "")}) for each in value["failures"]]
                found.append((bool(value["ended"]), records))
        return found

    def _conclude(self) -> None:
        try:
            if self._meeting is None:  # it failed before any rank could meet another
                return
            own = self._own if self._own is not None else self._failures_of(self._meeting.attempt)
            with contextlib.suppress(RuntimeError):
                self.measure()
            self._post(own, ended=True)
            self._hear_others(self._meeting)
            told = self._board.add(f"told/{self._meeting.name}")
            until = time.monotonic() + OTHERS_S
            while self._is_clock and told < self._meeting.machines and time.monotonic() < until:
                self._answer()  # the others may still ask for the time
                time.sleep(0.02)
                told = self._board.add(f"told/{self._meeting.name}", 0)
        finally:
            self._known.set()

    def _hear_others(self, meeting: Meeting) -> None:
        begun = time.monotonic()
        while True:
            self._answer()
            found = self._read(meeting)
            self._all = order_failures(record for _, failures in found for record in failures)
            has_cause = any(not record.consequence for record in self._all)
            waited_s = time.monotonic() - begun
            if sum(ended for ended, _ in found) >= meeting.machines or waited_s > OTHERS_S * (1 if has_cause else 2):
                return
            time.sleep(0.05)


def restart_line(failures: Sequence[FailureRecord], before: Meeting, now: Meeting, restarts: int) -> str:
    """Say why the ranks meet anew. Pure."""
    why = f" after {failures[0].line}" if failures else ""
    if now.attempt > before.attempt:
        return f"restart {now.attempt} of {restarts}{why}"
    if now.machines != before.machines:
        return f"going on with {now.machines} machines instead of {before.machines}{why}"
    return f"started again with the other machines{why}"
