"""Seeds that a rank set, and the states of its random generators when they were used."""

from dataclasses import dataclass

from instep.check.observations import Observation


@dataclass(frozen=True, kw_only=True)
class Seeded(Observation):
    """The script seeded a generator."""

    generator: str
    """`torch`, `numpy` or `random`."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class SampleNoise(Observation):
    """A dataset drew random numbers when the first batch of a pass was fetched."""

    worker: int
    """-1: the rank's own process."""
    generator: str
    """`torch`, `numpy`, `random`, or `dataset.NAME` for one that the dataset holds."""
    state: int
    """A hash of its state before the batch was fetched."""


@dataclass(frozen=True, kw_only=True)
class TrainingNoise(Observation):
    """Random numbers were drawn between a batch and its backward pass."""

    generator: str
    state: int
    """A hash of its state when the batch was yielded."""
    batch: int
    """How many batches had been yielded."""
