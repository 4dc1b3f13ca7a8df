"""How ranks work together: replicas of a model, their inputs, and whether their numbers may differ."""

from dataclasses import dataclass

from instep.check.observations import Observation


@dataclass(frozen=True, kw_only=True)
class ReplicaForward(Observation):
    """A model that is replicated or sharded for data parallelism got an input."""

    wrapper: str
    """`ddp` or `fsdp`."""
    group_size: int
    """Ranks that average their gradients."""
    input_hash: int
    """0: there was no tensor in it."""
    num_rows: int
    """Of its first tensor."""
    has_grad: bool


@dataclass(frozen=True, kw_only=True)
class Joined(Observation):
    """`Join` was entered: ranks may have different numbers of batches."""
