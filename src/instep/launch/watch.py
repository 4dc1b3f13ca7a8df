"""Watch the ranks of this node for hangs: end an attempt that hangs, with one sentence that says why.

One thread of the launcher reads the ranks' pulses. Only if no rank has moved for too long does it ask them for their
stacks. A hang is recorded as the failure of the rank that the others wait for; the restart policy decides what follows,
as after any failure.

Ranks: none; this runs in the launcher. Issues no collectives.
"""

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from instep.core.errors import FailureRecord
from instep.guard.hang import all_stuck, busy_ranks, busy_timeout_s, hang_timeout_s, recheck_after_s
from instep.guard.observation import Frame, Observation, Process
from instep.guard.processes import descendants_of, kill, spent_by, state_of, system_call_of
from instep.guard.pulse import Beat
from instep.guard.stacks import Asked, collect_stacks
from instep.guard.verdict import Verdict, judge, judge_busy
from instep.launch.failures import environment_failure
from instep.launch.logs import LogPlan
from instep.launch.relay import Relay
from instep.launch.scratch import Scratch

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.2, 1.0
_SUSPENDED_S = 5.0
"""After a longer gap between two polls (a suspended job) the watch cannot know what the ranks did meanwhile."""
_MAX_HELPERS = 32
_LOOKS_S = (0.4, 0.7)
"""The pauses before the second and the third look at a quiet job; only then it counts as hung."""


class Observer:
    """Looks at the ranks of one attempt from outside: stacks, and what the kernel knows of their processes.

    It asks processes of this launch for their stacks, and ends nothing.
    """

    def __init__(self, scratch: Scratch, attempt: int) -> None:
        self.texts: dict[int, str] = {}
        """The stacks of each rank's processes at the last look."""
        self._scratch, self._attempt = scratch, attempt

    def look(self, beats: Mapping[int, Beat], helpers: bool = False) -> list[Observation]:
        """Return where every rank is; with `helpers`, also where its data workers are."""
        states = {rank: state_of(beat.pid, beat.start_ticks) for rank, beat in beats.items()}
        families = {rank: descendants_of(beats[rank].pid) for rank, state in states.items() if state}
        # Before the signal that asks for stacks: it interrupts the system call and takes some CPU time.
        calls = {rank: system_call_of(beats[rank].pid) for rank in families}
        spent = {rank: spent_by([beats[rank].pid, *family]) for rank, family in families.items()}
        asked = {rank: self._asked(rank, beats[rank]) for rank in families if states[rank] not in "Tt"}
        answers = collect_stacks(asked)
        self.texts = {rank: text for rank, (_, text) in answers.items()}
        now = time.monotonic()
        helpers_of = self._helpers(beats, families) if helpers else {}
        observations = []
        for rank, beat in beats.items():
            process = None
            if states[rank]:
                stack = answers[rank][0] if rank in answers else ()
                process = Process(pid=beat.pid, state=states[rank], stack=stack, system_call=calls[rank])
            observations.append(
                Observation(
                    rank=rank,
                    process=process,
                    step=beat.step,
                    phase=beat.phase,
                    quiet_s=now - beat.time_s,
                    helpers=tuple(helpers_of.get(rank, ())),
                    **dataclasses.asdict(spent[rank]) if rank in spent else {},
                )
            )
        return observations

    def _helpers(self, beats: Mapping[int, Beat], families: Mapping[int, list[int]]) -> dict[int, list[Process]]:
        """Return where the ranks' children are; one per rank is asked at a time, since they share a stacks file."""
        helpers: dict[int, list[Process]] = {rank: [] for rank in families}
        for number in range(min(_MAX_HELPERS, max(map(len, families.values()), default=0))):
            pids = {rank: family[number] for rank, family in families.items() if number < len(family)}
            processes = {
                rank: Process(pid=pid, state=state_of(pid, None) or "S", system_call=system_call_of(pid))
                for rank, pid in pids.items()
            }
            asked = {
                rank: dataclasses.replace(self._asked(rank, beats[rank]), pid=process.pid, start_ticks=None)
                for rank, process in processes.items()
                if process.state not in "Tt"
            }
            answers = collect_stacks(asked)
            for rank, process in processes.items():
                stack: tuple[Frame, ...] = ()
                if rank in answers:
                    stack, text = answers[rank]
                    self.texts[rank] = f"{self.texts.get(rank, '')}its process {process.pid}:\n{text}"
                if stack or process.is_stopped:  # one that does not answer is no fork of the rank, but another program
                    helpers[rank].append(dataclasses.replace(process, stack=stack))
        return helpers

    def _asked(self, rank: int, beat: Beat) -> Asked:
        return Asked(beat.pid, beat.start_ticks, beat.main_thread, self._scratch.stacks(self._attempt, rank))


@dataclass
class Watch:
    """Watches the ranks of an attempt until the block is left."""

    scratch: Scratch
    attempt: int
    logs: LogPlan
    relay: Relay
    hang_after_s: float | None
    """How long no rank may move; None: derived from how the job moved so far."""
    several_nodes: bool
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="instep-watch", daemon=True)
        self._observer = Observer(self.scratch, self.attempt)
        self._beats: dict[int, Beat] = {}
        self._moved_s = time.monotonic()
        """When any rank last moved, or this watch started."""
        self._longest_s = 0.0
        self._made_a_step = False
        self._first_made: tuple[float, int] | None = None
        """When the first step was seen, and how many a rank had made then."""
        self._look_at_s = 0.0
        self._said = ""
        self._said_busy_s = 0.0

    def __enter__(self) -> None:
        if sys.platform == "linux":  # /proc has what is needed on Linux only
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """Poll the pulses, and look at the ranks when all of them are quiet."""
        before_s = time.monotonic()
        poll_s = _SHORTEST_POLL_S
        while not self._ending.wait(poll_s):
            now = time.monotonic()
            self._follow()
            if now - before_s > _SUSPENDED_S:
                self._moved_s = now
            before_s = now
            patience = hang_timeout_s(self.hang_after_s, self._made_a_step, self._longest_s)
            poll_s = min(_LONGEST_POLL_S, max(_SHORTEST_POLL_S, patience / 20))
            if self._beats and now - self._moved_s >= patience and now >= self._look_at_s:
                self._look(patience)
                before_s = time.monotonic()
                self._look_at_s = before_s + recheck_after_s(patience)

    def _follow(self) -> None:
        """Read the pulses."""
        if not self._beats:  # no rank has started
            self._moved_s = time.monotonic()
        for rank, beat in self.scratch.beats(self.attempt).items():
            known = self._beats.get(rank)
            if known is not None and known.time_s == beat.time_s:
                continue
            if known is not None and known.made:
                self._longest_s = max(self._longest_s, beat.time_s - known.time_s)
            self._made_a_step |= beat.made > 0
            if beat.made and self._first_made is None:
                self._first_made = beat.time_s, beat.made
            self._moved_s = max(self._moved_s, beat.time_s)
            self._beats[rank] = beat

    def _look(self, patience_s: float) -> None:
        """End the ranks if all are stuck at several looks, or if one computes for much longer while all others wait."""
        observer = self._observer
        if self.scratch.load_failures(self.attempt):
            return  # the attempt is ending already
        look, looked_s = observer.look(self._beats), time.monotonic()
        if all(observation.process is None for observation in look):
            return
        busy: list[int] = []
        for pause_s in _LOOKS_S:
            if self._ending.wait(pause_s):
                return
            last = pause_s == _LOOKS_S[-1]
            later, later_s = observer.look(self._beats, helpers=last), time.monotonic()
            busy = busy_ranks(look, later, later_s - looked_s)
            is_stuck = all_stuck(look, later, later_s - looked_s)
            if self.scratch.beats(self.attempt) != self._beats or not (is_stuck or busy):
                return
            look, looked_s = later, later_s
        if self._ending.is_set() or self.scratch.load_failures(self.attempt):
            return
        if busy:
            self._handle_busy(judge_busy(look, busy, self._step_s()), patience_s)
            return
        verdict = judge(look)
        if self.several_nodes:
            self._say(verdict.sentence)
        # Ranks of one node that all wait may wait for one of another node, which is busy: that node's watch decides.
        if verdict.culprits or not self.several_nodes:
            self._end(verdict, observer.texts)

    def _handle_busy(self, verdict: Verdict, patience_s: float) -> None:
        """Report a rank that the others wait for while it computes, at ever longer intervals; in the end, end it."""
        quiet_s, timeout_s = time.monotonic() - self._moved_s, busy_timeout_s(self.hang_after_s, patience_s)
        if quiet_s >= timeout_s:
            self._end(verdict, self._observer.texts)
        elif quiet_s >= 2 * self._said_busy_s or quiet_s < self._said_busy_s:
            self._said_busy_s = quiet_s
            self.say(f"waiting: {verdict.sentence}. It is ended after {timeout_s:.0f} s (--hang-after).")

    def _step_s(self) -> float | None:
        """Return how long a step has taken on average; None: too few were made."""
        last = max(self._beats.values(), key=lambda beat: beat.made)
        if self._first_made is None or last.made - self._first_made[1] < 1:
            return None
        return (last.time_s - self._first_made[0]) / (last.made - self._first_made[1])

    def _end(self, verdict: Verdict, stacks: Mapping[int, str]) -> None:
        """Record the verdict, then kill every rank of the attempt."""
        for rank, text in stacks.items():
            if text:
                self.relay.write_unseen(self.logs.error_file(rank), f"where rank {rank} hung:\n{text}")
        for record in failures_of(verdict, sorted(self._beats), time.time_ns(), self.logs):
            self.scratch.save_failure(self.attempt, record)
        for beat in self._beats.values():
            kill(beat.pid, beat.start_ticks)

    def _say(self, sentence: str) -> None:
        """Print a new verdict at once: with several nodes, the failure itself is reported only at the end."""
        if sentence != self._said:
            self._said = sentence
            self.say(f"hung: {sentence}")


def failures_of(verdict: Verdict, ranks: list[int], time_ns: int, logs: LogPlan) -> list[FailureRecord]:
    """Return the failures that a verdict means, the culprit's first. Pure.

    If no rank of this node is to blame, one of another node may be: all are consequences then, so that one comes first.
    """
    first = verdict.culprits[0] if verdict.culprits else ranks[0]

    def record(rank: int) -> FailureRecord:
        is_first, log = rank == first, str(logs.error_file(rank))
        summary = f"hung: {verdict.sentence}" if is_first else "ended with the others, which hung"
        consequence = not (is_first and verdict.culprits)
        return environment_failure(summary, time_ns, rank, names_ranks=is_first, consequence=consequence, log=log)

    return [record(first), *(record(rank) for rank in ranks if rank != first)]
