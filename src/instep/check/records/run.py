"""How a rank's script began, went on and ended."""

from dataclasses import dataclass, field

from instep.check.observations import Observation


@dataclass(frozen=True, kw_only=True)
class Began(Observation):
    """The script began."""

    world_size: int
    script: str
    device: str = "cpu"
    """The kind of device that the rank has at hand, whether or not the script uses it."""


@dataclass(frozen=True, kw_only=True)
class OptimizerStepped(Observation):
    """An optimizer made a step."""

    optimizer: int
    """Which optimizer: 0 for the first that was seen."""
    lr: float | None = None
    """The learning rate of its first group of parameters; None: it is kept in a tensor."""
    group_size: int = 1
    """Ranks of the default process group; 1: there is none, or it has one rank."""


@dataclass(frozen=True, kw_only=True)
class TrainingEpochBegan(Observation):
    """The first step of an epoch: the loader that feeds the training has begun once more."""

    epoch: int
    """1 for the first."""


@dataclass(frozen=True, kw_only=True)
class EvaluationBegan(Observation):
    """The first evaluation after a step began."""


@dataclass(frozen=True, kw_only=True)
class Ended(Observation):
    """The script ended, or was seen for long enough."""

    how: str
    """`complete`, `watched` (long enough) or `failed`."""
    error: str = ""
    """What ended it, unless it is complete or enough was seen."""
    files: list[str] = field(default_factory=list)
    """The user's files that were imported, the script first."""
