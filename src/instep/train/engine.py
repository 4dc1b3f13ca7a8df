"""What a step works with: the models in training, the layers' context, the strategy, the precision."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.core.errors import TaskError
from instep.core.spec import TrainSpec
from instep.core.splitmix import mix64
from instep.data.batch_plan import BatchPlan, PartPlan
from instep.data.loader import GlobalBatch
from instep.guard.pulse import here
from instep.guard.straggler import StepTimer
from instep.parallel.batch_context import BatchContext
from instep.parallel.norm import update_running_statistics
from instep.parallel.preserve import SavedBuffers
from instep.parallel.registry import choose_strategy
from instep.parallel.shard_buffers import ShardBuffers
from instep.parallel.strategy import LossOf, StepSums
from instep.train.forward_state import ForwardState
from instep.train.precision import LossScale, Precision, wide_loss
from instep.train.train_state import TrainState
from instep.world.device import accelerator_of, has_streams
from instep.world.grid import Grid
from instep.world.seeds import derive, generators_restored
from instep.world.world import World


class Witness(Protocol):
    """Observes one rank's training: `instep verify` compares trainings with it, and disturbs them on purpose."""

    def begin(self, model: nn.Module) -> None:
        """Called before the first step."""

    def part(self, step: int, plan: PartPlan, indices: Sequence[int], batch: Any) -> None:
        """Called with the samples and the batch of each part of a step, counted from 1."""

    def gradients(self, step: int, model: nn.Module) -> None:
        """Called when the ranks have agreed on the gradients, and nothing has used them yet."""

    def finished(self, step: int) -> None:
        """Called after a step, and after its checkpoint if one was due."""

    def ended(self, hashes: Sequence[str]) -> None:
        """Called at the end with the hashes of the ranks' weights."""


class Engine:
    """Everything on one rank between a batch and an update."""

    def __init__(
        self,
        world: World,
        spec: TrainSpec,
        witness: Witness | None = None,
        notice: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.world = world
        self.spec = spec
        """As the run began: a loop of one's own may change the length and the batch size later."""
        self.witness = witness
        self.notice = notice
        """Logs something that a person should know, once for all ranks."""
        self.on_cpu = world.device.type == "cpu"
        self.trained: list[TrainState] = []
        self.context = BatchContext(world.device, derive(spec.seed, "noise"))
        self.grid = Grid.open(world, spec.mesh_of(world.world_size))
        self.strategy = choose_strategy(spec, self.grid, self.context)
        self.precision = Precision(spec, world.device, keeps_casts=not self.strategy.gathers_weights)
        self.loss_scale = LossScale() if spec.precision == "fp16" else None
        self.needs_norm = (
            spec.clip_norm is not None or spec.log_grad_norm or spec.on_nan == "skip" or spec.precision == "fp16"
        )
        """Whether a step computes the gradient's norm, and so sees whether it is finite: to look at all of it costs."""
        self.clips = self.needs_norm or spec.clip_value is not None
        """Whether a step looks at the gradient, or changes it, before it is applied."""
        self.is_full = False
        """Whether the step under way has a full batch: not the last one of an epoch."""
        self.reads_early = has_streams(world.device) and world.world_size == 1 and not spec.exact
        """Whether this rank's own loss is the step's, so that it may be read before the ranks have agreed."""
        self.pace = StepTimer()
        """How long this rank's own work takes."""
        self.pulse, self.waits = here(), world.waits
        mesh = self.grid.mesh
        holds_all = mesh.data_size == world.world_size
        self.forward_state = ForwardState(world, spec.exact, witness is not None, notice) if holds_all else None
        """None where ranks hold different parts of the model."""
        self.scalar_names: list[str] = []
        """Of the scalars that all ranks know, in the order of their slots ([Note: Scalars])."""
        self.must_look = False
        """Whether regions wait for a forward pass that looks for noise: then they run compiled in the first step."""
        self._has_stepped = False
        self._buffers: SavedBuffers | None = None
        """With on_nan=skip, as the step found them."""
        self._scalars: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._generators = [torch.default_generator]
        if (accelerator := accelerator_of(world.device)) is not None:
            self._generators.append(accelerator.default_generator(world.device))

    def compile_loss(self, loss_of: LossOf) -> LossOf:
        """Return a Task's loss as the strategy compiles it, for a model that is compiled by blocks."""
        self.must_look = self.strategy.calls_model
        return self.strategy.compile_loss(loss_of)

    def begin(self, plan: BatchPlan) -> None:
        """Prepare for steps with batches of this plan."""
        self.context.smallest_part = self.strategy.smallest_part(plan.smallest_part)

    def begin_step(self, step: int, num_shards: int, is_full: bool) -> None:
        """Set the step's noise, and remember what a step that is skipped must not change."""
        self.is_full = is_full
        self.context.begin_step(step, num_shards)
        compiles = False
        for trained in self.trained:
            trained.begin_step()
            compiles |= trained.compiled != ""
        # Nothing is compiled under the watches of the first step, unless a pass of its own looks before.
        self.context.compiles = compiles and is_full and (self._has_stepped or self.must_look)
        self._has_stepped = True
        for trained in self.trained if num_shards else ():
            trained.reducer.be_ready()
            if trained.shard_buffers is None:
                trained.shard_buffers = ShardBuffers(trained.model)
            trained.shard_buffers.begin_step()
        if self.spec.on_nan == "skip":
            self._buffers = SavedBuffers(trained.model for trained in self.trained)
        if self.forward_state is not None and self.forward_state.is_needed:
            self.forward_state.begin_step([trained.model for trained in self.trained])

    def begin_last_backward(self) -> None:
        """Reduce gradients while the backward pass that follows, the last of this step, computes them.

        Not those of several models: which of them a pass reaches may differ between ranks.
        """
        if len(self.trained) == 1:
            self.trained[0].reducer.begin_last_backward()

    def end_forward(self, batch: GlobalBatch) -> None:
        """Agree on what the forward passes of a step over this batch have changed."""
        if self.forward_state is not None and self.forward_state.is_needed:
            own = sum(part.plan.num_rows for part in batch.parts if part.plan.counted)
            self.forward_state.end_forward([trained.model for trained in self.trained], own / max(1, batch.size))

    def restore_buffers(self) -> None:
        """With on_nan=skip, undo what a step's forward passes left in buffers (running statistics)."""
        if self._buffers is not None:
            self._buffers.restore()

    def end_scaled_step(self, step: int, good: bool, overflowed: bool, weight: float | None) -> None:
        """In fp16, adapt the loss scale ([Note: Loss scale]), with a notice if a person should know."""
        if self.loss_scale is not None:
            self.loss_scale.end_step(good, overflowed, weight)
            if overflowed and (text := self.loss_scale.complaint(step)):
                self.notice(text)

    def begin_part(self, plan: PartPlan, passes: int) -> None:
        """Announce a part's rows to the layers, and seed the noise that layers do not own (never by the rank).

        `passes` counts how often this step went through its parts before.
        """
        self.context.begin_part(plan.first_row, plan.num_rows, plan.replicated, plan.shard, passes)
        self.seed_noise(plan.first_row, passes)

    def seed_noise(self, first_row: int, passes: int) -> None:
        """Seed the noise that layers do not own, for the rows that begin there."""
        self._seed(mix64(self.context.step_key + first_row + (passes << 40)) >> 1)

    def begin_update(self) -> None:
        """Seed the noise of an optimizer that draws some: not by what this rank's parts left, nor by row."""
        self.context.end_part()
        self._seed(mix64(self.context.step_key ^ 0x55504441) >> 1)

    @contextlib.contextmanager
    def evaluation_noise(self, step: int) -> Iterator[Callable[[], None]]:
        """Yield a function that seeds the noise of this rank's next chunk; leave the generators as they were.

        The seed depends on the step and the number of the chunk, which is the same one at any world size.
        """
        key = mix64(self.context.seed ^ mix64(step) ^ 0x4556414C)
        chunks = itertools.count(self.grid.data.rank, self.grid.data.world_size)
        with generators_restored(self._generators):
            yield lambda: self._seed(mix64(key + next(chunks)) >> 1, is_whole=True)

    def _seed(self, seed: int, is_whole: bool = False) -> None:
        """Seed torch's generators; of what is the same whole at any world size (a shard, a chunk), the others too."""
        for generator in self._generators:
            generator.manual_seed(seed)
        if is_whole or self.spec.exact:
            random.seed(seed)
            numpy.random.seed(seed & 0xFFFFFFFF)

    def end_shard(self, sums: StepSums) -> None:
        """Take what a shard of exact mode has left in the models: buffers, gradients, and what it counted."""
        num_changed = sum(t.shard_buffers.end_shard() for t in self.trained if t.shard_buffers is not None)
        for trained in self.trained:
            trained.reducer.end_shard(sums._replace(num_changed_buffers=float(num_changed)))

    def end_exact_step(self, apply: bool, buffers_changed: bool) -> None:
        """In exact mode, keep what the shards left in the models for the next step. Called on all ranks."""
        for trained in self.trained:
            trained.reducer.end_step()
            update_running_statistics(trained.model, self.world, self.context, apply)
            if trained.shard_buffers is not None and buffers_changed:
                trained.shard_buffers.end_step(self.world, apply)

    def scalar(self, value: float, like: torch.Tensor) -> torch.Tensor:
        """Return a number as a tensor that fits a loss; every step needs the same few."""
        key = (value, like.dtype)
        if key not in self._scalars:
            if len(self._scalars) > 64:
                self._scalars.clear()
            self._scalars[key] = torch.full((), value, dtype=like.dtype, device=like.device)
        return self._scalars[key].view_as(like)

    def run_backward(self, loss: torch.Tensor, scale: float) -> None:
        """Run the backward pass of a loss times `scale`, and times the loss scale ([Note: Loss scale])."""
        if not scale:
            self.backward_without_weight(loss)
            return
        if self.loss_scale is not None:
            scale *= self.loss_scale.factor
        loss = wide_loss(loss)
        loss.backward(None if scale == 1.0 else self.scalar(scale, loss))

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
        """Return what an optimizer trains."""
        for trained in self.trained:
            if trained.optimizer is optimizer:
                return trained
        raise TaskError("step.update(optimizer): this optimizer did not come from run.prepare().")

    def clear_gradients(self) -> None:
        """Drop the gradients of all models."""
        for trained in self.trained:
            trained.clear_gradients()

    def notices(self, spec: TrainSpec, compiled: bool, batch_size: int) -> list[str]:
        """Return what a person should know before the training; `spec` as the steps follow it."""
        rows = batch_size // spec.accumulate // self.grid.mesh.data_size
        sentences = list(self.strategy.notices(max(1, rows)))
        if choices := self._describe_choices(compiled):
            sentences.append(choices)
        if spec.ema is not None:
            sentences.append(f"ema={spec.ema:g}: evaluations use the averaged weights; checkpoints hold both.")
        if spec.recompute and not any(trained.recomputed for trained in self.trained):
            sentences.append("recompute: the model has no repeated blocks, so nothing is computed twice.")
        modules = (module for trained in self.trained for module in trained.model.modules())
        if spec.accumulate > 1 and not spec.exact and any(isinstance(module, _BatchNorm) for module in modules):
            sentences.append(
                f"BatchNorm's statistics cover one part of a batch, so accumulate={spec.accumulate} is another "
                "recipe than accumulate=1 (at any number of processes)."
            )
        return sentences

    def _describe_choices(self, compiled: bool) -> str:
        """Return `bf16, fused AdamW, compiled, recomputing 12 Block`; nothing for a plain training on CPU."""
        fused = sorted({type(trained.optimizer).__name__ for trained in self.trained if trained.fused})
        recomputed = ", ".join(trained.recomputed for trained in self.trained if trained.recomputed)
        if self.on_cpu and self.precision.name == "fp32" and not compiled and not recomputed:
            return ""
        choices = [self.precision.name, *(f"fused {name}" for name in fused)]
        if compiled:
            blocks = ", ".join(trained.compiled for trained in self.trained if trained.compiled)
            choices.append(f"compiled {blocks}".strip())
        return ", ".join(choices + [f"recomputing {recomputed}"] * bool(recomputed))
