"""How a rank's script began, went on and ended."""

from dataclasses import dataclass, field

from instep.check.observations import Observation


@dataclass(frozen=True, kw_only=True)
class Began(Observation):
    """The script began."""

    world_size: int
    script: str


@dataclass(frozen=True, kw_only=True)
class OptimizerStepped(Observation):
    """An optimizer made a step."""

    optimizer: int
    """Which optimizer: 0 for the first that was seen."""


@dataclass(frozen=True, kw_only=True)
class Ended(Observation):
    """The script ended, or was seen for long enough."""

    how: str
    """`complete`, `watched` (long enough) or `failed`."""
    error: str = ""
    files: list[str] = field(default_factory=list)
    """The user's files that were imported, the script first."""
