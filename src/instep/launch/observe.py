"""Look at the ranks of an attempt from outside: pulses, stacks, and what the kernel knows of their processes.

It asks processes of this launch for their stacks, and ends nothing.
Ranks: none; this runs in the launcher.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from instep.guard.observation import Frame, Observation, Process
from instep.guard.processes import descendants_of, spent_by, state_of, system_call_of
from instep.guard.pulse import Beat, read_pulse
from instep.guard.stacks import Asked, collect_stacks
from instep.launch.scratch import Scratch

_MAX_HELPERS = 32


class Observer:
    """Looks at the ranks of one attempt."""

    def __init__(self, scratch: Scratch, attempt: int) -> None:
        self.attempt = attempt
        self.texts: dict[int, str] = {}
        """The stacks of each rank's processes at the last look."""
        self._scratch = scratch

    def beats(self) -> dict[int, Beat]:
        """Read every rank's pulse."""
        ranks = self._scratch.watched_ranks(self.attempt)
        beats = {rank: read_pulse(self._scratch.pulse(self.attempt, rank)) for rank in ranks}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

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
        return Asked(beat.pid, beat.start_ticks, beat.main_thread, self._scratch.stacks(self.attempt, rank))
