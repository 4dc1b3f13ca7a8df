"""Lead a job on several machines: see all of them, decide by rounds.py, tell everybody.

    machines          how many have come; each takes the next number as its key
    word/3            what the machine with key 3 tells, once a second: who it is, where it is, how its round ended
    lead              the key of the machine that leads
    news              what the leading process tells, twice a second

Room: one thread of one launching process; reads and writes the board. Ranks: none. Issues no collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from instep.core.clock import now_ns
from instep.core.errors import FailureRecord
from instep.launch.machines.board import Board
from instep.launch.machines.line import HostGone, Line, Silent
from instep.launch.machines.rounds import RoundState, Rules, Sight, environment_failure, next_state

LOOK_S = 0.5
_PAUSE_S = 4.0
"""Whoever was not awake for so long (a suspended process) knows nothing of what the others did meanwhile."""
_FAREWELL_S = 10.0
_LOOKOUT_S = 0.1
"""So long an answer is waited for at once: a disk that is well gives it."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a machine tells."""

    count: int
    """Another one each time: so it is known to be alive, whatever the clocks say."""
    name: str
    address: str
    board_address: str
    """Where it reaches the board: an address of the machine that hosts it; empty there, if a person chose another."""
    port: int
    """Of its listener."""
    number: int
    """The round that it is in, or was in last."""
    ranks: list[int]
    left: str
    done: bool
    failures: list[dict[str, Any]]


@dataclass
class _Known:
    """What is remembered of a machine."""

    word: Word
    came_s: float
    heard_s: float


class Leader:
    """Leads until it is told to end, and the others have gone."""

    def __init__(self, board: Board, key: int, rules: Rules, progress: Callable[[], int]) -> None:
        self._line = Line(board)
        self._is_host = board.is_host
        self._key = key
        self._rules = rules
        self._lookout = Lookout(progress, rules.lost_after_s)
        self._begun_at = self._lookout.ask()
        self._known: dict[int, _Known] = {}
        self._looked_s = time.monotonic()
        self._state = RoundState(since_s=time.monotonic(), reached=self._begun_at or 0)
        self._peers: dict[int, tuple[str, str, int]] = {}
        self._pulse = 0
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="instep-lead", daemon=True)
        self._thread.start()

    def close(self, why: str) -> None:
        """End the job for all, unless it is over, and stop leading when nobody is left to be led."""
        with self._lock:
            if not self._state.over:
                name = self._known[self._key].word.name if self._key in self._known else "the leading machine"
                text = f"{name}, which leads this job, has left: {why}. {GOES_ON}"
                failure = environment_failure(text, now_ns())
                self._state = dataclasses.replace(self._state, over=True, running=False, failures=(failure,))
        deadline = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline and self._thread.is_alive() and not self._alone():
            time.sleep(0.1)
        self._ending.set()
        self._thread.join()

    def _alone(self) -> bool:
        others = [k for key, k in list(self._known.items()) if key != self._key and not k.word.left]
        now_s = time.monotonic()
        return not any(now_s - k.heard_s < self._rules.lost_after_s for k in others)

    def _run(self) -> None:
        try:
            self._lead()
        except BaseException as error:  # all others would only notice silence
            text = f"the leading process cannot go on: {type(error).__name__}: {error}. {GOES_ON}"
            failures = (environment_failure(text, now_ns()),)
            self._state = dataclasses.replace(self._state, over=True, running=False, failures=failures)
            self._pulse += 1
            news = {"pulse": self._pulse, "leader": "", "peers": {}, **plain(self._state)}
            self._line.call(lambda board: board.post("news", news))
            raise

    def _lead(self) -> None:
        while not self._ending.wait(LOOK_S):
            try:
                words = self._line.call(_read_words)
                news = self._decide(words)
                self._line.call(lambda board, news=news: board.post("news", news))  # type: ignore[misc]
            except (Silent, HostGone):
                continue  # a board of another process's: the machines notice that nobody leads them

    def _decide(self, words: Mapping[int, Word]) -> dict[str, Any]:
        now_s = time.monotonic()
        self._take_in(words, now_s)
        sights = self._sights(now_s)
        with self._lock:
            number = self._state.number
            if self._begun_at is None:
                self._begun_at = self._lookout.ask()
                self._state = dataclasses.replace(self._state, reached=self._begun_at or 0)
            progress = self._lookout.ask() if self._state.is_judged else None
            self._state = next_state(self._state, sights, self._rules, progress, now_s, now_ns())
            state = self._state
        if state.number != number:
            self._peers = self._addresses(state.members)
        self._pulse += 1
        leader = self._known[self._key].word.name if self._key in self._known else ""
        return {"pulse": self._pulse, "leader": leader, "peers": self._peers, **plain(state)}

    def _take_in(self, words: Mapping[int, Word], now_s: float) -> None:
        """Remember what the machines tell."""
        slept_s = now_s - self._looked_s
        self._looked_s = now_s
        for known in self._known.values() if slept_s > _PAUSE_S else ():
            known.heard_s += slept_s
        for key, word in words.items():
            known_ = self._known.setdefault(key, _Known(word, now_s, now_s))
            if word.count > known_.word.count:  # a connection that was given up may bring an older one
                known_.word, known_.heard_s = word, now_s

    def _sights(self, now_s: float) -> list[Sight]:
        names = names_of({key: known.word for key, known in self._known.items()})
        found = []
        for key, known in self._known.items():
            word = known.word
            current = word.number == self._state.number
            found.append(
                Sight(
                    key=key,
                    name=names[key],
                    age_s=now_s - known.came_s,
                    quiet_s=now_s - known.heard_s,
                    left=word.left,
                    ranks=tuple(word.ranks) if current else (),
                    done=word.done and current,
                    failures=tuple(FailureRecord(**each) for each in word.failures) if current else (),
                )
            )
        return found

    def _addresses(self, members: tuple[int, ...]) -> dict[int, tuple[str, str, int]]:
        """Say where each member can be reached: the board's own machine where the others came in."""
        words = {key: self._known[key].word for key in members}
        names = names_of(words)
        found = {key: (names[key], word.address, word.port) for key, word in words.items()}
        told = [word.board_address for key, word in words.items() if key != self._key]
        if self._is_host and told and self._key in words and words[self._key].board_address:
            name, _, port = found[self._key]
            found[self._key] = (name, told[0], port)
        return found


GOES_ON = "The same command, on all machines, goes on from the newest checkpoint."


def _read_words(board: Board) -> dict[int, Word]:
    found = {key: board.read(f"word/{key}") for key in range(board.add("machines", 0) + 1)}
    return {key: Word(**each) for key, each in found.items() if each is not None}


class Lookout:
    """Finds out how far a run has come, on a disk that may keep whoever asks waiting, without waiting for it."""

    def __init__(self, progress: Callable[[], int], patience_s: float) -> None:
        self._progress, self._patience_s = progress, patience_s
        self._known, self._asked_s = 0, 0.0
        self._thread: threading.Thread | None = None

    def ask(self) -> int | None:
        """Give how far it has come since the first ask; None: not known yet. The disk's silence means: no further."""
        if self._thread is None or time.monotonic() - self._asked_s > 2 * self._patience_s:  # of a matter long over
            self._asked_s = time.monotonic()
            self._thread = threading.Thread(target=self._look, name="instep-lookout", daemon=True)
            self._thread.start()
        self._thread.join(_LOOKOUT_S)
        if self._thread.is_alive() and time.monotonic() - self._asked_s < self._patience_s:
            return None
        self._thread = None
        return self._known

    def _look(self) -> None:
        with contextlib.suppress(OSError):
            self._known = max(self._known, self._progress())


def names_of(words: Mapping[int, Word]) -> dict[int, str]:
    """Name machines so that no two have one name: by address where names are not enough, else by number. Pure."""
    names = Counter(word.name for word in words.values())
    places = Counter((word.name, word.address) for word in words.values())
    found = {}
    for key, word in words.items():
        if names[word.name] == 1:
            found[key] = word.name
        elif places[word.name, word.address] == 1:
            found[key] = f"{word.name} at {word.address}"
        else:
            found[key] = f"{word.name} #{key}"
    return found


def plain(state: RoundState) -> dict[str, Any]:
    """Give what the machines are told of a state."""
    return {
        "number": state.number,
        "members": list(state.members),
        "running": state.running,
        "over": state.over,
        "why": state.why,
        "waiting": state.waiting,
        "failures": [dataclasses.asdict(failure) for failure in state.failures],
    }
