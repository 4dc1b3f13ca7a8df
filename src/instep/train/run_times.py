"""Where the time of a run goes: its phases in every step, and its profile in a few.

Ranks: all make the same calls.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from instep.core.spec import TrainSpec
from instep.events.write import EventLog
from instep.guard.phase_log import PhaseLog, SampleRate, Traffic
from instep.guard.pulse import Phase, Pulse
from instep.train.profiling import RunProfile
from instep.train.train_state import TrainState
from instep.world.world import World


class RunTimes:
    """The begin and end of each step, for the pulse, the log of phases and the profile."""

    def __init__(
        self,
        pulse: Pulse,
        world: World,
        spec: TrainSpec,
        run_dir: Path,
        log: EventLog,
        trained: Sequence[TrainState],
        notice: Callable[[str], None],
    ) -> None:
        pulse.watch_waits(world.waits)
        self._pulse = pulse
        self._phases = PhaseLog(pulse, log, world.device, lambda: Traffic(world.comm_bytes, world.waits.total_s))
        self._profile = None if spec.profile is None else RunProfile(world, spec, run_dir, pulse, trained, notice)

    def begin_steps(self, step: int, num_steps: int, queue_depth: Callable[[], float | None]) -> None:
        """Note that steps begin, after `step` completed ones. Called on all ranks.

        `queue_depth` returns how many batches were ready when one was asked for, on average since the last call.
        """
        self._phases.last_step, self._phases.queue_depth = num_steps, queue_depth
        self._pulse.begin_steps(step)
        if self._profile is not None:
            self._profile.begin(step, num_steps)

    def end_step(self, step: int, num_rows: int) -> None:
        """Note that a step is completed, of which this rank had so many rows."""
        self._pulse.end_step(step)
        self._phases.end_step(step, num_rows)

    def next_step(self, step: int) -> None:
        """Note that all that follows a step is done, and the next one's data are awaited. Called on all ranks."""
        self._pulse.beat(Phase.DATA)
        if self._profile is not None:
            self._profile.passed(step)

    @property
    def rate(self) -> SampleRate | None:
        """How many samples this rank has computed since its start, and the time; None before there are any."""
        return self._phases.rate

    def close(self, step: int) -> None:
        """Write what is left. Issues no collective, so it is safe after a failure."""
        if self._profile is not None:
            self._profile.close()
        self._phases.close(step)
