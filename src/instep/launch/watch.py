"""Watch the ranks of this machine, and end an attempt that hangs: with one sentence that says why.

Room: one thread of the launching process. It reads pulses, and only when all ranks have been quiet for too long does it
ask them for their stacks. A hang is noted as the failure of the rank that the others wait for; what follows is the
restart policy's, as after any failure.

Ranks: none; this is the process that launches them. Issues no collectives.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from instep.core.errors import EXIT_ENVIRONMENT, FailureRecord
from instep.guard.looks import all_stuck
from instep.guard.patience import look_again_s, patience_s
from instep.guard.processes import kill
from instep.guard.pulse import Beat
from instep.guard.verdict import Verdict, judge
from instep.launch.logs import LogPlan
from instep.launch.observe import Observer
from instep.launch.relay import Relay
from instep.launch.scratch import Scratch

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.2, 1.0
_PAUSE_S = 5.0
"""Whoever was not awake for so long (a suspended job) knows nothing of what the ranks did meanwhile."""
_LOOKS_S = (0.4, 0.7)
"""How long after each other a quiet job is looked at before it is called hung."""


@dataclass(frozen=True)
class WatchPlan:
    """What to watch, and whom to tell."""

    scratch: Scratch
    logs: LogPlan
    relay: Relay
    hang_after_s: float | None
    """How long nobody may move; None: by what is usual for the job."""
    several_machines: bool
    stderr: TextIO


@contextlib.contextmanager
def watched(plan: WatchPlan, attempt: int) -> Iterator[None]:
    """Watch an attempt's ranks for as long as the block lasts."""
    if sys.platform != "linux":  # elsewhere no kernel tells what is needed
        yield
        return
    watch = _Watch(plan, attempt)
    thread = threading.Thread(target=watch.run, name="instep-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.ending.set()
        thread.join()


class _Watch:
    def __init__(self, plan: WatchPlan, attempt: int) -> None:
        self.ending = threading.Event()
        self._plan = plan
        self._observer = Observer(plan.scratch, attempt)
        self._beats: dict[int, Beat] = {}
        self._moved_s = time.monotonic()
        """When any rank last moved, or this watch began."""
        self._longest_s = 0.0
        self._made_a_step = False
        self._look_at_s = 0.0
        self._said = ""

    def run(self) -> None:
        """Look at the pulses now and then, and at the ranks when all of them are quiet."""
        before_s = time.monotonic()
        poll_s = _SHORTEST_POLL_S
        while not self.ending.wait(poll_s):
            now = time.monotonic()
            self._follow()
            if now - before_s > _PAUSE_S:
                self._moved_s = now
            before_s = now
            patience = patience_s(self._plan.hang_after_s, self._made_a_step, self._longest_s)
            poll_s = min(_LONGEST_POLL_S, max(_SHORTEST_POLL_S, patience / 20))
            if self._beats and now - self._moved_s >= patience and now >= self._look_at_s:
                self._look()
                before_s = time.monotonic()
                self._look_at_s = before_s + look_again_s(patience)

    def _follow(self) -> None:
        """Take in what the pulses say."""
        if not self._beats:  # nobody has begun
            self._moved_s = time.monotonic()
        for rank, beat in self._observer.beats().items():
            known = self._beats.get(rank)
            if known is not None and known.time_s == beat.time_s:
                continue
            if known is not None and known.made:
                self._longest_s = max(self._longest_s, beat.time_s - known.time_s)
            self._made_a_step |= beat.made > 0
            self._moved_s = max(self._moved_s, beat.time_s)
            self._beats[rank] = beat

    def _look(self) -> None:
        """Find out whether the ranks are stuck, and if so end them."""
        scratch, observer = self._plan.scratch, self._observer
        if scratch.load_failures(observer.attempt):
            return  # it is ending already
        look, looked_s = observer.look(self._beats), time.monotonic()
        if all(sighting.process is None for sighting in look):
            return
        for pause_s in _LOOKS_S:
            if self.ending.wait(pause_s):
                return
            last = pause_s == _LOOKS_S[-1]
            later, later_s = observer.look(self._beats, helpers=last), time.monotonic()
            if observer.beats() != self._beats or not all_stuck(look, later, later_s - looked_s):
                return
            look, looked_s = later, later_s
        if self.ending.is_set() or scratch.load_failures(observer.attempt):
            return
        verdict = judge(look)
        if self._plan.several_machines:
            self._say(verdict.sentence)
        # Ranks of one machine that all wait may wait for one of another, which is at work: that one's watch decides.
        if verdict.culprits or not self._plan.several_machines:
            self._end(verdict, observer.texts)

    def _end(self, verdict: Verdict, stacks: Mapping[int, str]) -> None:
        """Note the verdict, then end every rank of the attempt at once."""
        plan, observer = self._plan, self._observer
        for rank, text in stacks.items():
            if text:
                plan.relay.write_unseen(self._log(rank), f"where rank {rank} hung:\n{text}")
        for record in failures_of(verdict, sorted(self._beats), time.time_ns(), plan.logs):
            plan.scratch.save_failure(observer.attempt, record)
        for beat in self._beats.values():
            kill(beat.pid, beat.start_ticks)

    def _say(self, sentence: str) -> None:
        """Tell it at once, where elastic itself restarts: the person would not see a failure before the last one."""
        if sentence != self._said:
            self._said = sentence
            self._plan.stderr.write(f"hung: {sentence}\n")
            self._plan.stderr.flush()

    def _log(self, rank: int) -> Path:
        return self._plan.logs.error_file(rank)


def failures_of(verdict: Verdict, ranks: list[int], time_ns: int, logs: LogPlan) -> list[FailureRecord]:
    """Make of a verdict what the restart policy and the person are told. Pure.

    Where nobody here is to blame, somebody on another machine may be: what is known of that one comes first.
    """
    first = verdict.culprits[0] if verdict.culprits else ranks[0]
    records = [
        FailureRecord(
            rank=first,
            time_ns=time_ns,
            summary=f"hung: {verdict.sentence}",
            exit_code=EXIT_ENVIRONMENT,
            consequence=not verdict.culprits,
            log=str(logs.error_file(first)),
            names_ranks=True,
        )
    ]
    for rank in ranks:
        if rank != first:
            summary = "ended with the others, which hung"
            log = str(logs.error_file(rank))
            records.append(
                FailureRecord(rank=rank, time_ns=time_ns, summary=summary, exit_code=EXIT_ENVIRONMENT,
                              consequence=True, log=log)
            )  # fmt: skip
    return records
