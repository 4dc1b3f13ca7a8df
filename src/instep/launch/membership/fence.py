"""What ends the ranks of a node that is cut off from the others, or whose generation is over.

See [Note: Losing nodes] in agent.py. Issues no collectives.
"""

import contextlib
from dataclasses import dataclass

from instep.guard.processes import kill
from instep.launch.failures import environment_failure
from instep.launch.logs import LogPlan
from instep.launch.scratch import Scratch


@dataclass
class Attempt:
    """The ranks of this node in one generation."""

    number: int
    scratch: Scratch
    logs: LogPlan
    reason: tuple[str, bool] | None = None
    """Why they must end, and whether this node found that out by itself; set once."""
    ended_s: float | None = None

    def end_ranks(self, reason: str, own: bool, time_ns: int) -> None:
        """Kill all ranks that have started, and note why, unless they noted a failure themselves."""
        for rank, pulse in self.scratch.beats(self.number).items():
            if self.scratch.load_failure(self.number, rank) is None:
                summary, log = reason if own else f"ended: {reason}", str(self.logs.error_file(rank))
                record = environment_failure(summary, time_ns, rank, names_ranks=own, consequence=not own, log=log)
                with contextlib.suppress(OSError):  # a full disk: better ended without a note than not ended
                    self.scratch.save_failure(self.number, record)
            kill(pulse.pid, pulse.start_ticks)
