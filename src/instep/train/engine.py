"""What a step works with: the models in training, the layers' context, the numbers that scale a loss."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from instep.core.errors import TaskError
from instep.core.spec import TrainSpec
from instep.core.splitmix import mix64
from instep.core.stop import StopRequest
from instep.data.order import PartPlan
from instep.guard.straggler import StepTimer
from instep.parallel.batch_context import BatchContext
from instep.parallel.ddp import Ddp
from instep.parallel.dp import Dp
from instep.parallel.exact import Exact
from instep.parallel.exact_fsdp import ExactFsdp
from instep.parallel.fsdp import Fsdp, Sharding
from instep.parallel.pipeline.strategy import Pipeline
from instep.parallel.shard_buffers import ShardBuffers
from instep.parallel.shard_norm import update_running_statistics
from instep.parallel.single import Single
from instep.parallel.strategy import Strategy
from instep.parallel.tensor.strategy import ShardedTensor, Tensor
from instep.train.precision import LossScale, Precision
from instep.train.train_state import TrainState
from instep.train.witness import Witness
from instep.world.device import accelerator_of, has_streams
from instep.world.grid import Grid
from instep.world.seeds import derive
from instep.world.world import World


class Engine:
    """The machinery of one rank between a batch and an update."""

    def __init__(self, world: World, spec: TrainSpec) -> None:
        self.world = world
        self.spec = spec
        self.on_cpu = world.device.type == "cpu"
        self.trained: list[TrainState] = []
        self.context = BatchContext(world.device, derive(spec.seed, "noise"))
        self.grid = Grid.open(world, spec.mesh_of(world.world_size))
        self.precision = Precision(spec, world.device, remembers=self.grid.mesh.fsdp == 1)
        narrow = self.precision.dtype if spec.narrow_gather else None
        self.strategy = _choose_strategy(spec, self.grid, self.context, narrow)
        self.on_nan: Callable[[int, float], None] = _ignore
        """Told of a step whose loss is not finite, before anything is updated; may raise."""
        self.wants_save: Callable[[], bool] = _never
        """Tells whether this rank would have all of them save after this step."""
        self.say: Callable[[str], None] = _say_nothing
        """Tells a person something, once for all ranks."""
        self.loss_scale = LossScale() if spec.precision == "fp16" else None
        self.full_batch = 0
        """Samples of a step's global batch, unless it is an epoch's last."""
        self.is_full = False
        """Whether the step under way has that many."""
        self.reads_early = has_streams(world.device) and world.world_size == 1 and not spec.exact
        """Whether this rank's own loss is the step's, so that it may be read before the ranks have agreed."""
        self.witness: Witness | None = None
        self.stop_request = StopRequest()
        self.pace = StepTimer()
        """What this rank's own part of the steps takes."""
        self._buffers: list[list[torch.Tensor]] = []
        self._scalars: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._generators = [torch.default_generator]
        if (accelerator := accelerator_of(world.device)) is not None:
            self._generators.append(accelerator.default_generator(world.device))

    def begin_step(self, step: int, num_shards: int) -> None:
        """Set the step's noise, and remember what a step that is skipped must not change."""
        self.context.begin_step(step)
        self.context.num_shards = num_shards
        for trained in self.trained if num_shards else ():
            trained.begin_step()
            trained.reducer.be_ready()
            if trained.shard_buffers is None:
                trained.shard_buffers = ShardBuffers(trained.model)
            trained.shard_buffers.begin_step()
        if self.spec.on_nan == "skip":
            self._buffers = [[b.clone() for b in trained.model.buffers()] for trained in self.trained]

    def refuse_update(self, step: int, loss: float) -> None:
        """Undo what the forward passes left in buffers (running statistics), and tell; may raise."""
        if self.spec.on_nan == "skip":
            for trained, kept in zip(self.trained, self._buffers, strict=True):
                for buffer, value in zip(trained.model.buffers(), kept, strict=True):
                    buffer.copy_(value)
        self.on_nan(step, loss)

    def end_scaled_step(self, step: int, good: bool, overflowed: bool, weight: float | None) -> None:
        """In fp16, let the scale of the loss follow what became of a step ([Note: Loss scale])."""
        if self.loss_scale is not None:
            self.loss_scale.end_step(good, overflowed, weight)
            if overflowed and (text := self.loss_scale.complaint(step)):
                self.say(text)

    def begin_part(self, plan: PartPlan, passes: int) -> None:
        """Tell the layers which rows come, and seed the noise that they do not own (never by the rank).

        `passes` counts how often this step went through its parts before.
        """
        self.context.begin_part(plan.first_row, plan.num_rows, plan.replicated, plan.shard)
        self.seed_noise(plan.first_row, passes)

    def seed_noise(self, first_row: int, passes: int) -> None:
        """Seed the noise that the layers do not own, for the rows that begin there."""
        self._seed(mix64(self.context.step_key + first_row + (passes << 40)) >> 1)

    def begin_update(self) -> None:
        """Seed the noise of an optimizer that draws some: not by what this rank's parts left."""
        self._seed(mix64(self.context.step_key ^ 0x55504441) >> 1)

    def _seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)
        if self.spec.exact:  # a shard is the same one at any world size, so all its noise may be
            random.seed(seed)
            numpy.random.seed(seed & 0xFFFFFFFF)

    def end_shard(self, sums: Sequence[float | torch.Tensor]) -> None:
        """Take what a shard of exact mode has left in the models: buffers, gradients, and what it counted."""
        num_changed = sum(t.shard_buffers.end_shard() for t in self.trained if t.shard_buffers is not None)
        for trained in self.trained:
            trained.reducer.end_shard((*sums[:-1], float(num_changed)))

    def end_exact_step(self, apply: bool, buffers_changed: bool) -> None:
        """In exact mode, let what the shards left in the models be what the next step finds. Called on all ranks."""
        for trained in self.trained:
            trained.reducer.end_step()
            update_running_statistics(trained.model, self.world, self.context, apply)
            if trained.shard_buffers is not None and buffers_changed:
                trained.shard_buffers.end_step(self.world, apply)

    def scalar(self, value: float, like: torch.Tensor) -> torch.Tensor:
        """Give a number as a tensor that fits a loss; the same few are needed in every step."""
        key = (value, like.dtype)
        if key not in self._scalars:
            if len(self._scalars) > 64:
                self._scalars.clear()
            self._scalars[key] = torch.full((), value, dtype=like.dtype, device=like.device)
        return self._scalars[key].view_as(like)

    def backward_without_weight(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a part of weight 0, if layers need it ([Note: Parts of weight 0])."""
        if not self.context.connected:
            return
        self.context.set_zero_weight(True)
        try:
            loss.backward(self.scalar(0.0, loss))
        finally:
            self.context.set_zero_weight(False)

    def trained_by(self, optimizer: torch.optim.Optimizer) -> TrainState:
        """Find what an optimizer trains."""
        for trained in self.trained:
            if trained.optimizer is optimizer:
                return trained
        raise TaskError("step.update(optimizer): this optimizer did not come from run.prepare().")

    def has_batch_norm(self) -> bool:
        """Tell whether a model's answer depends on how a batch is cut into parts."""
        return any(isinstance(m, _BatchNorm) for trained in self.trained for m in trained.model.modules())

    def set_gradients(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Replace the gradients of all parameters of all models; none given: leave them."""
        for p, grad in zip(self._parameters() if grads else (), grads, strict=True):
            p.grad = grad

    def add_gradients(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add to the gradients of all parameters of all models, if any are given."""
        for p, grad in zip(self._parameters() if grads else (), grads, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for trained in self.trained for p in trained.model.parameters()]

    def clear_gradients(self) -> None:
        """Forget the gradients of all models."""
        for trained in self.trained:
            trained.clear_gradients()


def _ignore(step: int, loss: float) -> None:
    del step, loss


def _never() -> bool:
    return False


def _say_nothing(text: str) -> None:
    del text


def _choose_strategy(spec: TrainSpec, grid: Grid, context: BatchContext, narrow: torch.dtype | None) -> Strategy:
    if grid.mesh.pp > 1:
        spec.check_pipeline(grid.mesh)
        return Pipeline(grid, context, spec.schedule, spec.microbatches)
    if spec.exact:
        return ExactFsdp(grid, context) if grid.mesh.fsdp > 1 else Exact(grid, context)
    if grid.mesh.fsdp > 1:
        sharding = Sharding(spec.reshard, spec.offload, spec.meta_init, narrow)
        return ShardedTensor(grid, context, sharding) if grid.mesh.tp > 1 else Fsdp(grid, context, sharding)
    if grid.mesh.tp > 1:
        return Tensor(grid, context)
    if grid.world.world_size > 1:
        return Ddp(grid, context)
    return Dp(grid, context) if spec.strategy == "dp" else Single(grid, context)
