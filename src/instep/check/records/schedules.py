"""Steps of learning-rate schedules."""

from dataclasses import dataclass

from instep.check.observations import Observation


@dataclass(frozen=True, kw_only=True)
class SchedulerStepped(Observation):
    """The user's code or a framework called `scheduler.step()`."""

    scheduler: int
    """Which scheduler: 0 for the first that was seen."""
    type: str
    """Its class: `CosineAnnealingLR`."""
    updates: int
    """How often its optimizer was asked for a step before; a step that a GradScaler left out counts."""
    backwards: int
    """How many backward passes the rank had made before."""
    metric: float | None = None
    """What `ReduceLROnPlateau` was given."""
    position: int = 0
    """Its own count of steps, after this one."""
    horizon: int | None = None
    """The count after which the schedule ends, or turns: `T_max`."""
    package: str = ""
    """The installed package that called it; empty: the user's code."""
