"""What the user's variables and objects hold, as fingerprints: state that outlives a step, compared between ranks.

A path names a value: `file|function|model.queue`, from a variable of a function that is being executed (`<module>`: of
the file itself) to an attribute of what it holds.
"""

from dataclasses import dataclass, field

from instep.check.observations import Observation


@dataclass(frozen=True, kw_only=True)
class LiveState(Observation):
    """What a rank's variables held after an optimizer step, or when it left its process group."""

    moment: str
    """`step`, `evaluated` (the first step after an evaluation) or `left`."""
    number: int = 0
    """The n-th look of this moment: ranks are compared at the same moment, number and step."""
    numbers: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)
    """Tensors, arrays, and dicts of tensors, outside of modules."""
    buffers: dict[str, int] = field(default_factory=dict)
    """Tensors of modules that are no parameters; BatchNorm's are left out."""
    weights: dict[str, int] = field(default_factory=dict)
    """All parameters of a module that no optimizer steps: a copy, a teacher."""
    generators: dict[str, int] = field(default_factory=dict)
    ids: dict[str, dict[str, int]] = field(default_factory=dict)
    """Dicts from names to integers, and lists of names with their positions."""
    orders: dict[str, int] = field(default_factory=dict)
    """Sequences of integers, as a permutation is one."""
    layers: dict[str, str] = field(default_factory=dict)
    """Of each layer of a trained model, its mode and its numbers: `training=True, p=0.1`."""
    settings: dict[str, float] = field(default_factory=dict)
    """The numbers of each optimizer's parameter groups, as `0.1.lr`: of its second group."""
