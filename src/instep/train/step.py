"""One optimizer step over one global batch.

[Note: Weights]
The gradient of a step is the mean over the global batch, whatever the split (C4). A part's loss is a mean
over its rows, so it counts with its share of the rows; that share is known on every rank without asking, and
scales the loss before backward. When the user gives weights (tokens), their total is known only after the
reduction: losses count as mean times weight, and gradients are divided by the total afterwards. A part of
weight 0 contributes nothing, even if its mean is 0/0 ([Note: Parts of weight 0]).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from instep.core.errors import InstepError, TaskError
from instep.data.loader import GlobalBatch, Part
from instep.events.schema import StepRecord
from instep.guard.pulse import Phase, here
from instep.parallel.capture import call_of
from instep.parallel.pipeline.schedule import Microbatch
from instep.parallel.pipeline.stages import Staged
from instep.parallel.pipeline.strategy import Pipeline
from instep.train.arriving import Arriving
from instep.train.compile import Before, CompiledLoss, LossOf, is_compiled
from instep.train.engine import Engine
from instep.train.microbatches import cut_batch
from instep.train.train_state import TrainState

_HALVES = (torch.bfloat16, torch.float16)


class Step:
    """A global batch on its way to an update. Called alike on all ranks."""

    def __init__(
        self, engine: Engine, batch: GlobalBatch, ends_epoch: bool, on_finish: Callable[[StepRecord], None]
    ) -> None:
        self.number = batch.step + 1
        """Counted from 1."""
        self.epoch = batch.epoch
        self.ends_epoch = ends_epoch
        self.record: StepRecord | None = None
        """What happened; there once the step is finished."""
        self.stop_asked = False
        """Whether a rank was asked to stop; once the step is finished, all ranks know alike."""
        self.save_asked = False
        """Whether a checkpoint is due that all ranks write together; known as `stop_asked` is."""
        self._engine = engine
        self._batch = batch
        self._on_finish = on_finish
        self._part: Part | None = None
        self._weighted: bool | None = None
        """Whether parts come with a weight; None until one has been counted here."""
        self._has_gradient = False
        """Whether there was a backward pass since the last update."""
        self._loss_sum: Any = 0.0
        self._arriving: Arriving | None = None
        """The same, on its way to the host ([Note: Reading the loss])."""
        self._weight_sum = 0.0
        self._total_weight: float | None = None
        """Known once the ranks have agreed on the parts so far."""
        self._scaled_weight: float | None = None
        """The same, where the user gives weights."""
        self._loss = 0.0
        self._grad_norm: float | None = None
        self._apply = True
        self._overflowed = False
        """Whether an update was left out because float16 could not hold its gradients."""
        self._buffers_changed = False
        self._passes = 0
        self._pulse = here()
        self._begun, self._waited = time.perf_counter(), engine.world.waited_s
        engine.is_full = batch.size == engine.full_batch
        engine.begin_step(batch.step, batch.num_shards)

    def shards(self) -> Iterator[Any]:
        """Give this rank's parts of the global batch, one after the other."""
        for part in self._batch.parts:
            self._pulse.beat(Phase.COMPUTE)
            self._engine.begin_part(part.plan, self._passes)
            self._part = part
            with self._engine.precision.autocast():
                yield part.batch
            self._end_part()
        self._passes += 1

    def compute(self, model: nn.Module, loss_of: LossOf) -> None:
        """Go through this rank's parts: `loss_of(model, batch)` and its backward pass, as in a Task."""
        for batch in self.shards():
            if isinstance(model, Staged):
                self._through_stages(model, loss_of)
            elif isinstance(loss_of, CompiledLoss) and loss_of.trials.is_due():
                self._compute_compiled(model, loss_of, batch)
            else:
                self.backward(*with_weight(loss_of(model, batch)))

    def _through_stages(self, model: Staged, loss_of: LossOf) -> None:
        """Take a part through a pipeline, in microbatches: forward, loss on its last stage, and back."""
        part, engine = self._part, self._engine
        assert part is not None
        assert isinstance(engine.strategy, Pipeline)
        plan = part.plan
        rows = plan.num_rows if plan.replicated else plan.micro_rows // engine.grid.mesh.data_size
        microbatches = []
        for first, num_rows, batch in cut_batch(part.batch, plan.num_rows, engine.strategy.num_microbatches(rows)):
            # A loss may draw noise before it calls the model, and does so again where it is computed: the same.
            engine.seed_noise(plan.first_row + first, self._passes)
            call = call_of(loss_of, batch)
            microbatches.append(Microbatch(plan.first_row + first, num_rows, batch, call))

        def work(replay: Callable[..., Any], microbatch: Microbatch) -> torch.Tensor | None:
            engine.seed_noise(microbatch.first_row, self._passes)
            loss, weight = with_weight(loss_of(replay, microbatch.batch))  # type: ignore[arg-type]
            scale = self._count(loss, weight, microbatch.num_rows)
            return _wide(loss) * (scale * self._loss_factor) if scale else None

        self._begin_gradient()
        model.local_stages.train(microbatches, plan.replicated, work)

    def _compute_compiled(self, model: nn.Module, loss_of: CompiledLoss, batch: Any) -> None:
        """Go through a part in compiled code; where that fails, without ([Note: Compiling])."""
        engine, part, trials = self._engine, self._part, loss_of.trials
        if trials.knows(batch):
            return self.backward(*with_weight(loss_of.compiled(model, batch)))
        assert part is not None
        before = Before(engine)
        sums = (self._loss_sum, self._weight_sum, self._weighted, self._has_gradient)
        grads = [p.grad for t in engine.trained for p in t.model.parameters()] if self._has_gradient else []
        if trials.is_first and not engine.spec.exact and not is_compiled(model):
            loss_of.look_for_noise(model, batch)
            before.put_back()
            engine.begin_part(part.plan, self._passes)
        engine.set_gradients([None] * len(grads))
        try:
            self.backward(*with_weight(loss_of.compiled(model, batch)))
        except InstepError:
            raise
        except Exception as error:
            if trials.cannot_repeat:
                raise trials.refusal(error) from error
            before.put_back()
            engine.set_gradients(grads)
            self._loss_sum, self._weight_sum, self._weighted, self._has_gradient = sums
            engine.begin_part(part.plan, self._passes)
            self.backward(*with_weight(loss_of(model, batch)))  # what is wrong with the loss itself is raised here
            return trials.give_up(error)
        engine.add_gradients(grads)
        return trials.passed(batch)

    def again(self) -> Iterator[tuple[Any, bool]]:
        """Give the same parts with the same noise once more, and whether they count: to see what went wrong."""
        for part in self._batch.parts:
            self._engine.begin_part(part.plan, 0)
            self._part = part
            with self._engine.precision.autocast():
                yield part.batch, part.plan.counted

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Add a part's gradient; `loss` is its mean, `weight` what it counts if that is not its rows."""
        part = self._part
        if part is None:
            raise TaskError("step.backward() outside of `for batch in step.shards()`: its rows are unknown.")
        scale = self._count(loss, weight, part.plan.num_rows)
        self._begin_gradient()
        with self._engine.precision.as_stored():
            if scale:
                loss, scale = _wide(loss), scale * self._loss_factor
                loss.backward(None if scale == 1.0 else self._engine.scalar(scale, loss))
            else:
                self._engine.backward_without_weight(loss)

    def _count(self, loss: torch.Tensor, weight: float | torch.Tensor | None, num_rows: int) -> float:
        """Add the loss of some rows of the current part to the step's; give what its gradient counts."""
        assert self._part is not None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TaskError(_not_a_scalar(loss))
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
        if scale:
            wide = _wide(loss)
            self._loss_sum += (wide.item() if self._engine.on_cpu else wide.detach()) * scale
            if self._engine.reads_early:
                self._arriving = Arriving(self._loss_sum)
        return scale

    def _begin_gradient(self) -> None:
        """Forget the last update's gradients, before the first ones of this step are added."""
        if not self._has_gradient:
            # Here and not after the last update: memory that was just let go is the fastest to take.
            self._engine.clear_gradients()
        self._has_gradient = True

    @property
    def _loss_factor(self) -> float:
        return 1.0 if self._engine.loss_scale is None else self._engine.loss_scale.factor

    def _end_part(self) -> None:
        """In exact mode, put a shard's gradient and sums away before the next one adds to them."""
        if not self._batch.num_shards or self._part is None:
            return
        self._engine.end_shard(self._sums())
        self._part, self._loss_sum, self._weight_sum = None, 0.0, 0.0

    def _sums(self) -> tuple[float | torch.Tensor, ...]:
        asked = (float(self._engine.stop_request.asked), float(self._engine.wants_save()))
        if not self._engine.grid.is_counted:  # another rank has the same rows, and counts them
            return 0.0, 0.0, 0.0, 0.0, *asked, 0.0
        weighted = (float(self._weighted is True), float(self._weighted is not None))
        loss_sum = self._loss_sum if self._arriving is None else float(self._arriving)
        return loss_sum, self._weight_sum, *weighted, *asked, 0.0

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Agree on one optimizer's gradients and apply it now; the parts that follow start from zero."""
        trained = self._engine.trained_by(optimizer)
        self._update(trained)
        if self._batch.num_shards:
            trained.reducer.be_ready()
        self._total_weight, self._weighted, self._has_gradient = None, None, False
        self._loss_sum = self._weight_sum = 0.0
        self._arriving = None

    def finish(self) -> StepRecord:
        """Agree on gradients, update what this step has not updated yet, step the schedules."""
        engine = self._engine
        lr = engine.trained[0].lr
        for trained in engine.trained:
            if not trained.updated:
                self._update(trained)
            trained.updated = False
        engine.end_scaled_step(self.number, self._apply, self._overflowed, self._scaled_weight)
        if self._batch.num_shards:
            engine.end_exact_step(self._apply, self._buffers_changed)
        self.record = StepRecord(
            step=self.number,
            epoch=self.epoch,
            loss=self._loss,
            lr=lr,
            num_samples=self._batch.size,
            grad_norm=self._grad_norm,
            skipped=not self._apply or self._overflowed,
        )
        self._on_finish(self.record)
        return self.record

    def _update(self, trained: TrainState) -> None:
        apply = self._agree(trained)
        if apply:
            self._engine.begin_update()
            trained.optimizer.step()
        trained.end_update(apply)

    def _agree(self, trained: TrainState) -> bool:
        """Bring gradients and loss together over all ranks; tell whether to apply them."""
        self._count_time()
        if not self._has_gradient:  # no backward pass since the last update: there is no gradient
            self._engine.clear_gradients()
        self._end_part()
        self._pulse.beat(Phase.REDUCE)
        loss, weight, num_weighted, num_parts, num_asked, num_saving, num_changed = trained.reduce(self._sums())
        self._pulse.beat(Phase.UPDATE)
        self._buffers_changed |= num_changed > 0
        self.stop_asked |= num_asked > 0
        self.save_asked |= num_saving > 0
        if 0 < num_weighted < num_parts:
            raise TaskError("loss gave a weight on some ranks and none on others. Give one always, or never.")
        weighted = num_weighted > 0  # in exact mode a rank may have had no part to know it from
        if self._total_weight is None:  # a second model brings the sums of the same parts again
            self._total_weight = weight
            self._loss = (loss / weight if weight else 0.0) if weighted else loss
            self._apply = math.isfinite(self._loss)
        self._scaled_weight = weight if weighted else None
        factor = (1.0 / weight if weighted and weight else 1.0) / self._loss_factor
        if factor != 1.0:
            trained.reducer.scale(factor)
        if self._engine.witness is not None:
            self._engine.witness.gradients(self.number, trained.model)
        spec, scale = self._engine.spec, self._engine.loss_scale
        overflowed = False
        # Looking at every gradient costs; who asks for it pays.
        if self._apply and (spec.clip_norm is not None or spec.on_nan == "skip" or scale is not None):
            norm = float(trained.reducer.clip(math.inf if spec.clip_norm is None else spec.clip_norm))
            self._grad_norm = norm if spec.clip_norm is not None and math.isfinite(norm) else None
            overflowed = not math.isfinite(norm) and scale is not None and scale.may_shrink
            self._apply = math.isfinite(norm) or overflowed
        self._overflowed |= overflowed
        if not self._apply:
            self._engine.refuse_update(self.number, self._loss)
        self._begun, self._waited = time.perf_counter(), self._engine.world.waited_s
        return self._apply and not overflowed

    def _count_time(self) -> None:
        """Add what this rank's parts took; layers that exchange something wait for others meanwhile."""
        waited_s = self._engine.world.waited_s - self._waited
        self._engine.pace.compute_s += time.perf_counter() - self._begun - waited_s


def with_weight(loss: Any) -> tuple[Any, Any]:
    """Give what a Task's loss returned as a mean and a weight, which is None where it gave none."""
    return loss if isinstance(loss, tuple) else (loss, None)


def _wide(loss: torch.Tensor) -> torch.Tensor:
    """Give a loss in a dtype that is fine enough, and long enough, for what it is multiplied by."""
    return loss.float() if loss.dtype in _HALVES else loss


def _not_a_scalar(loss: Any) -> str:
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    return (
        f"loss gave {found}; the mean over the batch, a single number, is needed. "
        "Use .mean(), or reduction='mean' in the loss function."
    )
