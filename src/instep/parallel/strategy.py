"""What a strategy, one way to distribute a model over ranks, has to provide.

A strategy is chosen once, before the model exists (`registry.py`). It distributes the model, and makes for each
optimizer the reducer that agrees with the other ranks on gradients. Code that serves all strategies asks the strategy,
and tests neither its class nor the mesh.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from instep.core.mesh import Axis, Mesh
from instep.core.spec import TrainSpec
from instep.parallel.batch_context import BatchContext
from instep.parallel.blocks import Blocks
from instep.parallel.capture import Call
from instep.parallel.dropout import replace_dropout
from instep.parallel.gradients import clip_gradients, local_gradients
from instep.parallel.norm import sync_batch_norm
from instep.parallel.regional import RegionalLoss, compile_blocks
from instep.parallel.zero_weight import zero_gradient_of_outputs
from instep.world.grid import Grid

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype that a precision computes in, where that is not the tensors' own."""

Example = Callable[[], Call]
"""Returns the arguments of a model's call for a few rows, on CPU."""
Layers = Callable[[nn.Module], Sequence[Callable[..., Any]]]
"""Returns a model's layers; applied one after the other, they make up the model."""
TensorPlanOf = Callable[[nn.Module], Mapping[str, Any]]
"""Returns how a model's layers are split, by their paths: in words, or as PyTorch's ParallelStyles."""
LossOf = Callable[[nn.Module, Any], Any]
"""Returns the loss of a batch as a Task does: a mean, or a mean and its weight."""


@dataclass(frozen=True)
class ModelHints:
    """What the user knows of a model; the same on all ranks."""

    example: Example | None = None
    layers: Layers | None = None
    """Where a pipeline may cut it."""
    tensor_plan: TensorPlanOf | None = None
    blocks: Blocks | None = None
    """What is gathered, or computed again, at a time."""


NO_HINTS = ModelHints()


NUM_SCALARS = 8
"""How many scalars of one's own travel with the step's sums."""
NO_SCALARS = (0.0,) * (2 * NUM_SCALARS)


class StepSums(NamedTuple):
    """The numbers that are added up over the ranks together with the gradients of a step."""

    loss: float | torch.Tensor = 0.0
    """Of each part, its loss times its weight."""
    weight: float = 0.0
    """The weights that the user gave."""
    num_weighted: float = 0.0
    """Ranks (in exact mode: shards) whose loss came with a weight."""
    num_counted: float = 0.0
    """Ranks (in exact mode: shards) that counted a loss."""
    num_stop_requests: float = 0.0
    num_save_requests: float = 0.0
    num_changed_buffers: float = 0.0
    """In exact mode: buffers that the shards changed."""
    num_new_scalars: float = 0.0
    """Scalars that have no slot below ([Note: Scalars])."""
    scalars: tuple[float | torch.Tensor, ...] = NO_SCALARS
    """Of each scalar, its mean times its weight, and the weight."""

    def row(self) -> tuple[float | torch.Tensor, ...]:
        """Return all numbers, to be added up one by one: NUM_SUMS."""
        return *self[:-1], *self.scalars

    def on_host(self) -> StepSums:
        """Return the same numbers, those on a device as floats."""
        if type(self.loss) is float and self.scalars is NO_SCALARS:  # most steps on CPU
            return self
        return self._replace(loss=float(self.loss), scalars=tuple(map(float, self.scalars)))

    @classmethod
    def of(cls, row: Sequence[float]) -> StepSums:
        """Return the sums of such rows."""
        return cls(*row[: -2 * NUM_SCALARS])._replace(scalars=tuple(row[-2 * NUM_SCALARS :]))  # type: ignore[arg-type]


NUM_SUMS = len(StepSums().row())


class Reducer(ABC):
    """Makes the gradients of one optimizer's parameters the same on all ranks.

    Where gradients are shards, or those of a stage, `grid` has the ranks that hold the others.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], grid: Grid | None = None) -> None:
        self.parameters = list(parameters)
        self._grid = grid

    @abstractmethod
    def reduce(self, sums: StepSums) -> StepSums:
        """Add gradients, in place, and `sums` up over all ranks; return the sums. Called on all ranks."""

    def begin_last_backward(self) -> None:  # noqa: B027 - most have nothing to do
        """Reduce gradients, from now on, as soon as they are ready: the backward pass that follows is a step's last."""

    def begin_reduce(self) -> None:  # noqa: B027 - most have nothing to do
        """Begin to reduce what does not depend on the step's sums: backward is over. Called on all ranks."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what refers to the parameters: another reducer takes this one's place."""

    def be_ready(self) -> None:  # noqa: B027 - most have nothing to do
        """Allow passes that not every rank makes; before the parts of a step, in exact mode. Called on all ranks."""

    def end_step(self) -> None:  # noqa: B027 - most have nothing to do
        """Release what `be_ready` acquired; in exact mode."""

    def forget(self) -> None:  # noqa: B027 - most keep nothing
        """Drop what was gathered in this step so far."""

    def end_shard(self, sums: StepSums) -> None:
        """Take the gradient of a shard, in exact mode, with what it adds to the step's sums."""
        raise NotImplementedError

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        if gradients := local_gradients(self.parameters):
            torch._foreach_mul_(gradients, factor)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients by their global norm; return the norm before. Called on all ranks."""
        return clip_gradients(self.parameters, max_norm, self._grid)

    def clip_values(self, limit: float) -> None:
        """Clip each element of the gradients, as torch.nn.utils.clip_grad_value_ does: a rank what it holds."""
        if gradients := local_gradients(self.parameters):
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)


class StepPart(Protocol):
    """The part of a step that is computed now, as a strategy sees it."""

    @property
    def rows(self) -> PartRows:
        """Which rows of the global batch it has."""

    def run_whole(self, model: nn.Module, loss_of: LossOf) -> None:
        """Run the whole part: forward, loss, backward."""

    def cut(self, num_pieces: int) -> list[tuple[int, int, Any]]:
        """Cut the part's batch by rows; return each piece's first row, its number of rows, and the piece."""

    def seed_noise(self, first_row: int) -> None:
        """Seed the noise that layers do not own, for the rows from `first_row` of the global batch on."""

    def begin_gradient(self) -> None:
        """Clear the last update's gradients, unless this step has added to them."""

    def scaled_loss(self, loss: Any, num_rows: int) -> torch.Tensor | None:
        """Count what `loss_of` returned for some of the rows; return what to call backward on, None for nothing."""

    def count_backward(self, seconds: float) -> None:
        """Note how much of the time since the part began went into backward passes that the strategy ran itself."""


class PartRows(Protocol):
    """Where the rows of a part are in the global batch."""

    @property
    def first_row(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def micro_rows(self) -> int: ...
    @property
    def replicated(self) -> bool: ...


class Strategy(ABC):
    """One way to distribute a model. To add one: a subclass, its line in `registry.py`, its name in `core/mesh.py`."""

    name: ClassVar[str]
    axes: ClassVar[tuple[Axis, ...]] = ()
    """The axes of the mesh along which it needs several ranks."""
    is_exact: ClassVar[bool] = False
    """Whether it is for exact mode."""
    is_partial: bool = False
    """Whether a rank holds only a part of the model, so that all ranks save together."""
    has_all_names: bool = True
    """Whether a rank holds every parameter, or a piece of it; if not, some are known to other ranks only."""
    gathers_weights: ClassVar[bool] = False
    """Whether ranks that share a batch gather weights in each forward pass: all must make as many passes, and a weight
    that was cast is not kept for its next use."""
    calls_model: ClassVar[bool] = True
    """Whether a rank can call the model and go backward from its output."""
    allows_channels_last: ClassVar[bool] = False
    """Whether the weights of convolutions may have that memory format ([Note: channels_last])."""
    compiles_by_default: ClassVar[bool] = False
    """Whether a step is compiled on GPUs unless the user decides."""
    compiles_blocks: ClassVar[bool] = False
    """Whether `compile_blocks` compiles a model; if not, the loss is compiled as a whole, the model in it."""

    @classmethod
    def serves(cls, spec: TrainSpec, mesh: Mesh) -> bool:
        """Return whether it is a strategy for a mesh; of several, the first in the registry is chosen."""
        return spec.exact == cls.is_exact and all(mesh.along(axis) > 1 for axis in cls.axes)

    @classmethod
    def of(cls, spec: TrainSpec, grid: Grid, context: BatchContext) -> Strategy:
        """Make the strategy as the spec asks for it. Called on all ranks."""
        del spec  # for strategies that have options
        return cls(grid, context)

    def __init__(self, grid: Grid, context: BatchContext) -> None:
        self.grid = grid
        self.context = context
        self._without_hooks: list[nn.Module] = []
        """Models whose outputs need no hook ([Note: Parts of weight 0]), as long as no model needs one."""
        self.said: list[str] = []
        """What a person should know of how the model was distributed."""

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Build a model that is to be distributed."""
        return make()

    def spread(self, model: nn.Module, hints: ModelHints) -> nn.Module:
        """Move a model to this rank, with the same layers, weights and answer as on one rank. Called on all ranks."""
        del hints  # for strategies that have to look into the model
        model = self.replace_layers(model)
        model = model.to(self.grid.world.device)
        # The seed gives every rank the same weights; a model may have drawn some from elsewhere.
        self.grid.world.broadcast([*model.parameters(), *model.buffers()])
        return model

    def replace_layers(self, model: nn.Module) -> nn.Module:
        """Replace the layers that depend on the whole batch."""
        model = replace_dropout(model, self.context)
        self.connect(model, bool(sync_batch_norm(model, self.grid.data, self.context)))
        return model

    def connect(self, model: nn.Module, connected: bool) -> None:
        """Note whether ranks communicate in a model's backward pass; if in one, all models' outputs get a hook."""
        self._without_hooks.append(model)
        self.context.connected |= connected
        while self._without_hooks and self.context.connected:
            zero_gradient_of_outputs(self._without_hooks.pop(), self.context)

    def compile_blocks(self, model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
        """Compile the blocks of a model that was spread, in place, or all of it as a whole; return whether by blocks.

        `blocks` were found before the model was spread. Called on all ranks.
        """
        compile_blocks(blocks or [model], self.context)
        return bool(blocks)

    def compile_loss(self, loss_of: LossOf) -> LossOf:
        """Return a Task's loss as `run_part` is to get it, where blocks are compiled: compiled but for its model."""
        return RegionalLoss(loss_of, self.context)

    def rest(self, model: nn.Module) -> None:  # noqa: B027 - most models always are
        """Bring a model to rest: its parameters are what this rank holds between two steps. Issues no collectives."""

    def set_trainable(self, model: nn.Module, trainable: Mapping[nn.Parameter, bool]) -> None:
        """Set whether parameters require a gradient, between two steps. Called on all ranks."""
        self.rest(model)
        for p, flag in trainable.items():
            p.requires_grad_(flag)

    def adapt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer fit the way its parameters are distributed."""
        for group in optimizer.param_groups:
            # Each operation on a DTensor has a price of its own, on CPU many times that of the numbers.
            is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
            if is_open and any(isinstance(p, DTensor) for p in group["params"]):
                group["foreach"] = True

    def run_part(self, part: StepPart, model: nn.Module, loss_of: LossOf) -> None:
        """Run a part of a step: forward, loss, backward. Called on all ranks that share the part's micro-batch."""
        part.run_whole(model, loss_of)

    def smallest_part(self, rows: int) -> int:
        """Return the rows, over all ranks, of the smallest piece into which `rows` rows are cut."""
        return rows

    def num_parameters(self, model: nn.Module) -> int:
        """Return the number of trained values, on all ranks together."""
        return sum(p.numel() for p in model.parameters())

    def notices(self, rows: int) -> list[str]:
        """Return what a person should know before the training, in which a part has `rows` rows for each replica."""
        del rows
        return self.said

    def report(self) -> list[str]:
        """Return what a person should know after the training. Called on all ranks."""
        return []

    @abstractmethod
    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        """Make the reducer of one optimizer's parameters."""
