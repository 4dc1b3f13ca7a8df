"""What happened to models, losses, gradients and optimizers.

Every kind carries `order`, a counter of the rank: these observations belong on one timeline (`records/timeline.py`).
Optimizers, and wrapped models, are numbered as they were built.
"""

from dataclasses import dataclass, field

from instep.check.observations import Observation


@dataclass(frozen=True, kw_only=True)
class GradientEvent(Observation):
    """Anything that has its place on the timeline."""

    order: int


@dataclass(frozen=True, kw_only=True)
class ModelWrapped(GradientEvent):
    """A model was wrapped by DistributedDataParallel, or the first forward pass of a sharded one began."""

    wrapper: int
    strategy: str
    """`ddp`, `fsdp1` or `fsdp2`."""
    names: list[str] = field(default_factory=list)
    """The parameters whose gradients DistributedDataParallel reduces, in its order."""
    ranks: list[int] = field(default_factory=list)
    """The ranks of its process group."""
    num_bytes: int = 0
    callers: list[str] = field(default_factory=list)
    """The user's functions that wrapped it, the innermost first, as `file:line:function`."""
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


@dataclass(frozen=True, kw_only=True)
class CommHookRegistered(GradientEvent):
    """A communication hook decides how DistributedDataParallel reduces gradients."""

    wrapper: int


@dataclass(frozen=True, kw_only=True)
class WrapperChanged(GradientEvent):
    """A part of a model was replaced, added or unfrozen after DistributedDataParallel had taken its parameters."""

    wrapper: int
    how: str
    """`unfrozen` or `added`."""
    name: str


@dataclass(frozen=True, kw_only=True)
class ForwardRan(GradientEvent):
    """A wrapped model was called."""

    wrapper: int
    reduces: bool
    """Whether the backward pass will reduce gradients: outside `no_sync`, with gradients enabled."""
    enabled: bool
    """Whether gradients were enabled."""
    model_devices: list[str] = field(default_factory=list)
    input_devices: list[str] = field(default_factory=list)
    num_devices: int = 0
    """Accelerators that this rank can see."""
    unused: int = -1
    """Bytes of parameters that the previous iteration did not use, where the wrapper looks for them; -1: unknown."""


@dataclass(frozen=True, kw_only=True)
class WrapperBypassed(GradientEvent):
    """A part of a wrapped model was called, with gradients enabled, outside a call of the wrapper."""

    wrapper: int
    module: str
    """Its name in the model; empty: the model itself."""


@dataclass(frozen=True, kw_only=True)
class BackwardRan(GradientEvent):
    """A backward pass ended."""

    loss: float
    factor: float
    """By which numbers the loss was multiplied (1 / 4: divided by four), as far as its graph begins with such."""
    reduction: str
    """How the loss was made from single values: `mean`, `sum`, or empty: the graph does not tell."""
    num_targets: int = 0
    """Targets that the loss averages over; 0: not known."""
    num_ignored: int = 0
    """Targets that it ignores."""
    all_reduced: bool = False
    """Whether the loss went through an all-reduce that autograd knows."""
    loss_scale: float = 1.0
    """Of the GradScaler."""
    in_no_sync: bool = False
    """Whether a DistributedDataParallel was inside `no_sync` when the backward pass began."""
    unreduced: list[int] = field(default_factory=list)
    """Sharded models that were told not to reduce gradients."""
    cleared: list[int] = field(default_factory=list)
    """Optimizers whose gradients were zero or None when it began."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Some elements of the gradients of an optimizer's parameters when it ended."""


@dataclass(frozen=True, kw_only=True)
class OptimizerBuilt(GradientEvent):
    """An optimizer was built."""

    optimizer: int
    num_parameters: int
    callers: list[str] = field(default_factory=list)
    """As in ModelWrapped."""


@dataclass(frozen=True, kw_only=True)
class GradientsCleared(GradientEvent):
    """`zero_grad` was called."""

    optimizer: int
    lost: bool
    """Whether there was a gradient that is not zero."""
    in_step: bool
    """Whether a closure called it, inside `optimizer.step`."""


@dataclass(frozen=True, kw_only=True)
class GradientsClipped(GradientEvent):
    """Gradients were clipped."""

    optimizers: list[int]
    """Whose parameters they belong to."""
    function: str
    limit: float
    norm: float
    """The norm before clipping; -1: clipped by value."""
    pending_scale: float
    """The GradScaler's scale, if the gradients still contained it; else 1."""
    sharded: bool
    """Whether the norm may be of a shard only: flat parameters of FSDP1, whose shards this function does not know."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """As in BackwardRan, before clipping."""


@dataclass(frozen=True, kw_only=True)
class StepTaken(GradientEvent):
    """An optimizer made a step."""

    optimizer: int
    number: int
    """How many steps this optimizer had made before."""
    num_parameters: int
    num_without_gradient: int
    all_zero: bool
    """Whether no gradient was there, or all that were sampled are zero."""
    orphans: int
    """Parameters of wrapped models that have a gradient and belong to no optimizer."""
    num_collectives: int
    """Collectives that the script called since the previous step."""
    learning_rate: float
    is_detailed: bool
    """Whether the lists that follow have an entry for each parameter; else only the combined hashes are there."""
    gradient_hash: dict[str, int]
    """By wrapper (-1: none) a hash of sampled elements of all gradients; sharded parameters are left out."""
    gradient_norm: dict[str, float]
    """The norm of the same elements."""
    parameter_hash: dict[str, int]
    """As `gradient_hash`, of the parameters before the step."""
    names: list[str] = field(default_factory=list)
    wrappers: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """Of the gradients; -1: there is none."""
    norms: list[float] = field(default_factory=list)
    """Of the sampled elements of the gradients."""
    parameter_hashes: list[int] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GatherUsed(GradientEvent):
    """A loss depends on what an all_gather returned for a tensor that requires gradients."""

    function: str
    shape: list[int]
    has_gradient: bool
    """Whether the script put its own part, with its gradient, back among the gathered ones."""
    is_whole: bool
    """Whether every rank compares all rows with all rows, so that its own part's gradient is complete."""


@dataclass(frozen=True, kw_only=True)
class GatherMade(GradientEvent):
    """An all_gather took a tensor that requires gradients, between two optimizer steps; once for each way to it."""

    function: str
    shape: list[int]
    lines: list[int] = field(default_factory=list)
    """Of the user's functions that led to it, the innermost first."""


@dataclass(frozen=True, kw_only=True)
class FunctionUsed(GradientEvent):
    """A loss was computed from what an autograd function of the script's returned that gathers; once for each."""

    function: str
    """The name of its class."""
    beside_input: bool
    """Whether the loss also depends on what it was given, on a way around it: local rows are compared with all."""


@dataclass(frozen=True, kw_only=True)
class ReducedUsed(GradientEvent):
    """A loss was computed from a tensor that all_reduce had changed in place, behind autograd's back."""

    shape: list[int]


@dataclass(frozen=True, kw_only=True)
class TensorReduced(GradientEvent):
    """The script called all_reduce on a tensor of numbers; once for each line and step."""

    num_elements: int
    operation: str
