"""One optimizer step over one global batch.

[Note: Weights]
The gradient of a step is the mean over the global batch, whatever the split (C4). A part's loss is a mean over its
rows, so it counts with its share of the rows; every rank knows that share, and scales the loss before backward. When
the user gives weights (tokens), their total is known only after the reduction: losses count as mean times weight, and
gradients are divided by the total afterwards. A part of weight 0 contributes nothing, even if its mean is 0/0
([Note: Parts of weight 0]).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from instep.core.errors import TaskError
from instep.core.stop import StopRequest
from instep.data.batch_plan import PartPlan
from instep.data.loader import GlobalBatch, Part
from instep.events.schema import StepRecord
from instep.guard.pulse import Phase
from instep.parallel.regional import raising_compile_errors
from instep.parallel.strategy import LossOf, StepSums
from instep.train.arriving import ArrivingNumbers
from instep.train.compile import CompiledLoss, is_compiled, look_for_noise, note_state
from instep.train.engine import Engine
from instep.train.precision import wide_loss
from instep.train.reading import cut_batch
from instep.train.scalars import ScalarSums, loss_parts
from instep.train.tokens import count_tokens
from instep.train.train_state import TrainState

_NOTHING = nullcontext()


class StepHooks(NamedTuple):
    """How a step asks its run, and reports to it."""

    finished: Callable[[StepRecord, bool, int], None]
    """Called with the record of a step, whether it ends an epoch, and how many rows of it this rank had."""
    refused: Callable[[Step, float], None]
    """Called on all ranks with a loss, when it or the gradient is not finite, before anything is updated; may raise."""
    wants_save: Callable[[], bool]
    """Returns whether this rank would have all ranks save after this step."""
    stop_request: StopRequest


class Step:
    """A global batch on its way to an update. Called alike on all ranks.

    The methods under "for strategies" are those of `parallel.strategy.StepPart`.
    """

    # What a step begins with: here, because to set all of it takes a noticeable part of a short step.
    record: StepRecord | None = None
    """What happened; there once the step is finished."""
    stop_asked = False
    """Whether a rank was asked to stop."""
    save_asked = False
    """Whether a checkpoint is due that all ranks write together."""
    computed: tuple[nn.Module, LossOf] | None = None
    """What `compute` was called with."""
    _part: Part | None = None
    _weighted: bool | None = None
    """Whether parts come with a weight; None until one has been counted here."""
    _has_gradient = False
    """Whether there was a backward pass since the last update."""
    _loss_sum: Any = 0.0
    _arriving: ArrivingNumbers | None = None
    """The sum of losses, and those of scalars, on their way to the host."""
    _weight_sum = 0.0
    _total_weight: float | None = None
    """Known once the ranks have agreed on the parts so far."""
    _scaled_weight: float | None = None
    """The same, where the user gives weights."""
    _loss = 0.0
    _grad_norm: float | None = None
    _apply = True
    _overflowed = False
    """Whether an update was left out because float16 could not hold its gradients."""
    _buffers_changed = False
    _has_agreed = False
    """Whether the ranks have agreed on what forward passes changed."""
    _passes = 0

    def __init__(self, engine: Engine, batch: GlobalBatch, ends_epoch: bool, is_full: bool, hooks: StepHooks) -> None:
        self.number = batch.step + 1
        """Counted from 1."""
        self.epoch = batch.epoch
        self.ends_epoch = ends_epoch
        self._engine = engine
        self._batch = batch
        self._hooks = hooks
        self._scalars = ScalarSums(engine.scalar_names)
        self._pulse = engine.pulse
        self._begun, self._waited = time.perf_counter(), engine.waits.seconds
        engine.begin_step(batch.step, batch.num_shards, is_full)

    def shards(self) -> Iterator[Any]:
        """Yield this rank's parts of the global batch, one after the other."""
        engine = self._engine
        for part in self._batch.parts:
            self._pulse.beat(Phase.FORWARD)
            engine.begin_part(part.plan, self._passes)
            self._part = part
            if engine.precision.dtype is None:
                yield part.batch
            else:
                with engine.precision.autocast():
                    yield part.batch
            if self._batch.num_shards:
                self._end_part()
        self._passes += 1

    def compute(self, model: nn.Module, loss_of: LossOf) -> None:
        """Run this rank's parts: `loss_of(model, batch)` and its backward pass, as in a Task."""
        self.computed = model, loss_of
        run_part = self._engine.strategy.run_part
        for _ in self.shards():
            run_part(self, model, loss_of)

    @property
    def parts(self) -> tuple[Part, ...]:
        """This rank's parts of the global batch."""
        return self._batch.parts

    def again(self) -> Iterator[tuple[Any, bool]]:
        """Yield the same parts with the same noise once more, and whether they count: to see what went wrong."""
        for part in self._batch.parts:
            self._engine.begin_part(part.plan, 0)
            self._part = part
            with self._engine.precision.autocast():
                yield part.batch, part.plan.counted

    def backward(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, scalars: Mapping[str, Any] | None = None
    ) -> None:
        """Add a part's gradient; `loss` is its mean, `weight` what it counts if that is not its rows.

        `scalars` are means to be logged beside it, which count as much.
        """
        engine = self._engine
        scale = self._count(loss, weight, scalars, self.rows.num_rows)
        self.begin_gradient()
        self._pulse.beat(Phase.BACKWARD)
        if self._part is self._batch.parts[-1]:
            engine.begin_last_backward()
        if engine.precision.dtype is None and not engine.context.compiles:  # without contexts that would do nothing
            engine.run_backward(loss, scale)
            return
        errors = raising_compile_errors() if engine.context.compiles else _NOTHING
        with engine.precision.as_stored(), errors:
            engine.run_backward(loss, scale)

    def log(self, *, weight: float | None = None, **scalars: Any) -> None:
        """Log means over the part under way by name; `weight` is what they count if that is not its rows."""
        if self.rows.counted:
            self._scalars.add(scalars, self.rows.num_rows / self._batch.size if weight is None else float(weight))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Agree on one optimizer's gradients and apply it now; the parts that follow start from zero."""
        trained = self._engine.trained_by(optimizer)
        self._update(trained)
        if self._batch.num_shards:
            trained.reducer.be_ready()
        self._total_weight, self._weighted, self._has_gradient = None, None, False
        self._has_agreed = False
        self._loss_sum = self._weight_sum = 0.0
        self._arriving = None
        self._scalars.begin_pass()

    def finish(self) -> StepRecord:
        """Agree on gradients, update what this step has not updated yet, step the schedules; return the record."""
        engine = self._engine
        lr = float(engine.trained[0].optimizer.param_groups[0]["lr"])
        for trained in engine.trained:
            if not trained.updated:
                self._update(trained)
            trained.updated = False
        if engine.loss_scale is not None:
            engine.end_scaled_step(self.number, self._apply, self._overflowed, self._scaled_weight)
        if self._batch.num_shards:
            engine.end_exact_step(self._apply, self._buffers_changed)
        self.record = StepRecord(
            step=self.number,
            epoch=self.epoch,
            loss=self._loss,
            lr=lr,
            num_samples=self._batch.size,
            num_tokens=count_tokens(self._scaled_weight, self._batch.size, self._batch.num_tokens),
            grad_norm=self._grad_norm,
            skipped=not self._apply or self._overflowed,
            scalars=self._scalars.means() if engine.scalar_names else {},
        )
        self._hooks.finished(self.record, self.ends_epoch, self._batch.num_rows)
        return self.record

    # For strategies.

    @property
    def rows(self) -> PartPlan:
        """The rows of the part under way."""
        if self._part is None:
            raise TaskError("step.backward() outside of `for batch in step.shards()`: its rows are unknown.")
        return self._part.plan

    def run_whole(self, model: nn.Module, loss_of: LossOf) -> None:
        """Run the whole part under way: forward, loss, backward."""
        assert self._part is not None
        batch = self._part.batch
        if isinstance(loss_of, CompiledLoss):
            loss_of.trials.run(
                batch,
                lambda: self.backward(*loss_parts(loss_of.compiled(model, batch))),
                lambda: self.backward(*loss_parts(loss_of(model, batch))),
                lambda: self._begin_trial(model, loss_of, batch),
            )
            return
        if self._engine.must_look and self._engine.context.compiles:
            look_for_noise(self._engine, model, loss_of, batch)
            self._engine.must_look = False
            self._engine.begin_part(self.rows, self._passes)
        self.backward(*loss_parts(loss_of(model, batch)))

    def cut(self, num_pieces: int) -> list[tuple[int, int, Any]]:
        """Cut the part under way by rows; return each piece's first row, its number of rows, and the piece."""
        assert self._part is not None
        return cut_batch(self._part.batch, self._part.plan.num_rows, num_pieces)

    def seed_noise(self, first_row: int) -> None:
        """Seed the noise that layers do not own, for the rows from `first_row` of the global batch on."""
        self._engine.seed_noise(first_row, self._passes)

    def begin_gradient(self) -> None:
        """Clear the last update's gradients, unless this step has added to them."""
        if not self._has_gradient:
            # Here and not after the last update: memory that was just freed is the fastest to take.
            self._engine.clear_gradients()
        self._has_gradient = True

    def scaled_loss(self, loss: Any, num_rows: int) -> torch.Tensor | None:
        """Count what `loss_of` returned for some rows of the part; return what to call backward on, or None."""
        parts = loss_parts(loss)
        scale = self._count(*parts, num_rows)
        factor = 1.0 if self._engine.loss_scale is None else self._engine.loss_scale.factor
        return wide_loss(parts.mean) * (scale * factor) if scale else None

    def count_backward(self, seconds: float) -> None:
        """Note how much of the time since the part began went into backward passes that the strategy ran itself."""
        self._pulse.move(Phase.FORWARD, Phase.BACKWARD, seconds)

    def _begin_trial(self, model: nn.Module, loss_of: CompiledLoss, batch: Any) -> Callable[[], None]:
        """Note what compiled code may change before it fails ([Note: Compiling]); return what restores it."""
        engine, plan = self._engine, self.rows
        restore_state = note_state(engine)
        counted = (self._loss_sum, self._weight_sum, self._weighted, self._has_gradient)
        scalars = self._scalars.copy()
        parameters = [p for trained in engine.trained for p in trained.model.parameters()] if self._has_gradient else []
        grads = [None if p.grad is None else p.grad.clone() for p in parameters]  # backward adds to them in place
        if not loss_of.trials.known and not engine.spec.exact and not is_compiled(model):
            look_for_noise(engine, model, loss_of, batch)
            engine.begin_part(plan, self._passes)

        def restore() -> None:
            restore_state()
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad
            self._loss_sum, self._weight_sum, self._weighted, self._has_gradient = counted
            self._scalars.restore(scalars)
            engine.begin_part(plan, self._passes)

        return restore

    def _count(self, loss: Any, weight: Any, scalars: Mapping[str, Any] | None, num_rows: int) -> float:
        """Add the loss of some rows of the current part to the step's; return what its gradient counts."""
        assert self._part is not None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TaskError(
                f"loss returned a {kind}; the mean over the batch, a single number, is needed. "
                "Use .mean(), or reduction='mean' in the loss function."
            )
        if self._weighted is not None and self._weighted != (weight is not None):
            raise TaskError(
                "some parts of this step came with a weight and some without. Give all of them one, or none."
            )
        self._weighted = weight is not None
        if not self._part.plan.counted:
            return 0.0
        if weight is None:
            scale = num_rows / self._batch.size
        else:
            scale = float(weight)
            self._weight_sum += scale
        if scalars:
            self._scalars.add(scalars, scale)
        if scale:
            # Not in place: a trial of compiled code may have to restore the sum before.
            self._loss_sum = self._loss_sum + (loss.item() if self._engine.on_cpu else wide_loss(loss).detach()) * scale
            if self._engine.reads_early:
                self._arriving = ArrivingNumbers([self._loss_sum, *self._scalars.on_device()])
        return scale

    def _end_part(self) -> None:
        """In exact mode, put a shard's gradient and sums away before the next one adds to them."""
        if self._part is None:
            return
        self._engine.end_shard(self._sums())
        self._part, self._loss_sum, self._weight_sum = None, 0.0, 0.0
        self._scalars.end_shard()

    def _sums(self) -> StepSums:
        stop = 1.0 if self._hooks.stop_request.asked else 0.0
        save = 1.0 if self._hooks.wants_save() else 0.0
        if not self._engine.grid.is_counted:  # another rank has the same rows, and counts them
            return StepSums(num_stop_requests=stop, num_save_requests=save)
        loss = self._loss_sum
        if self._arriving is not None:
            loss, *arrived = self._arriving.tolist()
            if len(arrived) == len(self._scalars.on_device()):  # else some were logged later
                self._scalars.arrive(arrived)
        is_weighted, is_counted = 1.0 if self._weighted else 0.0, 0.0 if self._weighted is None else 1.0
        parts = self._batch.parts if self._part is None else [self._part]
        num_new, scalars = self._scalars.sums(parts)
        return StepSums(loss, self._weight_sum, is_weighted, is_counted, stop, save, 0.0, num_new, scalars)

    def _update(self, trained: TrainState) -> None:
        if not self._has_gradient:  # no backward pass since the last update: there is no gradient
            self._engine.clear_gradients()
        trained.reducer.begin_reduce()
        if not self._has_agreed:
            self._has_agreed = True
            self._engine.end_forward(self._batch)
        apply = self._agree(trained)
        if apply:
            self._engine.begin_update()
            trained.optimizer.step()
        trained.end_update(apply, self.ends_epoch)

    def _agree(self, trained: TrainState) -> bool:
        """Add gradients and loss up over all ranks; return whether to apply them."""
        engine = self._engine
        # What this rank's parts took, without the time that its layers waited for other ranks.
        waited_s = engine.waits.seconds - self._waited
        engine.pace.compute_s += time.perf_counter() - self._begun - waited_s
        if self._batch.num_shards:
            self._end_part()
        self._pulse.beat(Phase.REDUCE)
        sums = trained.reduce(self._sums())
        self._pulse.beat(Phase.UPDATE)
        self._buffers_changed |= sums.num_changed_buffers > 0
        self.stop_asked |= sums.num_stop_requests > 0
        self.save_asked |= sums.num_save_requests > 0
        if 0 < sums.num_weighted < sums.num_counted:
            raise TaskError("loss gave a weight on some ranks and none on others. Give one always, or never.")
        loss, weight = float(sums.loss), sums.weight
        weighted = sums.num_weighted > 0  # in exact mode a rank may have had no part to know it from
        if self._total_weight is None:  # a second model brings the sums of the same parts again
            self._total_weight = weight
            self._loss = (loss / weight if weight else 0.0) if weighted else loss
            self._apply = math.isfinite(self._loss)
            if engine.scalar_names or sums.num_new_scalars:
                self._scalars.agree(sums, engine.world, engine.grid.is_counted)
        self._scaled_weight = weight if weighted else None
        factor = 1.0 / weight if weighted and weight else 1.0
        if engine.loss_scale is not None:
            factor /= engine.loss_scale.factor
        if factor != 1.0:
            trained.reducer.scale(factor)
        if engine.witness is not None:
            engine.witness.gradients(self.number, trained.model)
        overflowed = self._apply and engine.clips and self._clip(trained)
        self._overflowed |= overflowed
        if not self._apply:
            engine.restore_buffers()
            self._hooks.refused(self, self._loss)
        self._begun, self._waited = time.perf_counter(), engine.waits.seconds
        return self._apply and not overflowed

    def _clip(self, trained: TrainState) -> bool:
        """Clip gradients and check that they are finite, where that is asked for; return whether float16 overflowed."""
        spec, scale, overflowed = self._engine.spec, self._engine.loss_scale, False
        if self._engine.needs_norm:
            norm = float(trained.reducer.clip(math.inf if spec.clip_norm is None else spec.clip_norm))
            self._grad_norm = norm if (is_finite := math.isfinite(norm)) else None
            overflowed = not is_finite and scale is not None and scale.may_shrink
            self._apply = is_finite or overflowed
        if spec.clip_value is not None:
            trained.reducer.clip_values(spec.clip_value)
        return overflowed
