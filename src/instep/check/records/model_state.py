"""Whether the ranks are replicas of one another: weights, buffers and random numbers, as fingerprints."""

from dataclasses import dataclass

from instep.check.observations import Observation


@dataclass(frozen=True, kw_only=True)
class FirstUpdate(Observation):
    """An optimizer is about to make its first step."""

    optimizer: int
    shapes: int
    """Fingerprint of the parameters' shapes."""
    weights: int
    """Fingerprint of the parameters."""
    gradients: int | None
    """Fingerprint of the gradients; None: there are none."""
    num_parameters: int
    is_sharded: bool
    """Whether parameters are DTensors: each rank then holds a part."""


@dataclass(frozen=True, kw_only=True)
class BeforeSharding(Observation):
    """A module is about to be sharded: FSDP takes each rank's part from that rank's weights."""

    number: int
    """Which of the modules: 0 for the first."""
    weights: int
    syncs: bool = False
    """Whether rank 0's weights are sent to the others."""
    package: str = ""
    """The installed package that shards it; empty: the user's code."""


@dataclass(frozen=True, kw_only=True)
class NormEntered(Observation):
    """The first BatchNorm of the model is about to run."""

    training: bool
    statistics: int
    """Fingerprint of its running mean and variance."""
    rows: int
    """The first dimension of its input."""


@dataclass(frozen=True, kw_only=True)
class NoiseDrawn(Observation):
    """Random numbers were drawn between a batch and its backward pass: dropout, or noise that the script adds."""

    before: list[int]
    """Fingerprints of the generators' states (CPU, then the rank's device) when the batch had been read."""
    after: list[int]
    """The same when the backward pass began."""
    framework: str = ""
    """The trainer that runs the loop: `transformers`, `lightning`; empty: the user's own loop."""


@dataclass(frozen=True, kw_only=True)
class SeedChosen(Observation):
    """`torch.manual_seed` was called. The place is where the seed is chosen, outside of functions that pass it on."""

    seed: int
