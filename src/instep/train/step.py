"""One optimizer step over one global batch.

[Note: Weights]
The gradient of a step is the mean over the global batch, whatever the split (C4). A part's loss is a mean
over its rows, so it counts with its share of the rows; that share is known on every rank without asking, and
scales the loss before backward. When the user gives weights (tokens), their total is known only after the
reduction: losses count as mean times weight, and gradients are divided by the total afterwards. A part of
weight 0 contributes nothing, even if its mean is 0/0 ([Note: Silent parts]).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from instep.core.errors import TaskError
from instep.data.loader import GlobalBatch, Part
from instep.events.schema import StepRecord
from instep.guard.pulse import Phase, here
from instep.train.engine import Engine
from instep.train.trained import Trained

LossOf = Callable[[nn.Module, Any], Any]
"""Gives the loss of a batch as a Task does: a mean, or a mean and its weight."""


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
        self._engine = engine
        self._batch = batch
        self._on_finish = on_finish
        self._part: Part | None = None
        self._weighted: bool | None = None
        self._loss_sum: Any = 0.0
        self._weight_sum = 0.0
        self._total_weight: float | None = None
        """Known once the ranks have agreed on the parts so far."""
        self._loss = 0.0
        self._grad_norm: float | None = None
        self._apply = True
        self._buffers_changed = False
        self._passes = 0
        self._pulse = here()
        self._begun, self._waited = time.perf_counter(), engine.world.waited_s
        engine.begin_step(batch.step, batch.num_shards)

    def shards(self) -> Iterator[Any]:
        """Give this rank's parts of the global batch, one after the other."""
        for part in self._batch.parts:
            self._pulse.beat(Phase.COMPUTE)
            self._engine.begin_part(part.plan, self._passes)
            self._part = part
            yield part.batch
            self._end_part()
        self._passes += 1

    def compute(self, model: nn.Module, loss_of: LossOf) -> None:
        """Go through this rank's parts: `loss_of(model, batch)` and its backward pass, as in a Task."""
        for batch in self.shards():
            self.backward(*with_weight(loss_of(model, batch)))

    def again(self) -> Iterator[tuple[Any, bool]]:
        """Give the same parts with the same noise once more, and whether they count: to see what went wrong."""
        for part in self._batch.parts:
            self._engine.begin_part(part.plan, 0)
            self._part = part
            yield part.batch, part.plan.counted

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Add a part's gradient; `loss` is its mean, `weight` what it counts if that is not its rows."""
        part = self._part
        if part is None:
            raise TaskError("step.backward() outside of `for batch in step.shards()`: its rows are unknown.")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TaskError(_not_a_scalar(loss))
        if self._weighted is not None and self._weighted != (weight is not None):
            raise TaskError(
                "some parts of this step came with a weight and some without. Give all of them one, or none."
            )
        if self._weighted is None:
            # Here and not after the last update: memory that was just let go is the fastest to take.
            self._engine.clear_gradients()
        self._weighted = weight is not None
        if not part.plan.counted:
            scale = 0.0
        elif weight is None:
            scale = part.plan.num_rows / self._batch.size
        else:
            scale = float(weight)
            self._weight_sum += scale
        if scale:
            self._loss_sum += (loss.item() if self._engine.on_cpu else loss.detach()) * scale
            loss.backward(None if scale == 1.0 else self._engine.scalar(scale, loss))
        else:
            self._engine.backward_in_silence(loss)

    def _end_part(self) -> None:
        """In exact mode, put a shard's gradient and sums away before the next one adds to them."""
        if not self._batch.num_shards or self._part is None:
            return
        self._engine.end_shard(self._sums())
        self._part, self._loss_sum, self._weight_sum = None, 0.0, 0.0

    def _sums(self) -> tuple[float | torch.Tensor, ...]:
        asked = float(self._engine.stop_request.asked)
        if not self._engine.grid.is_counted:  # another rank counts the same rows
            return 0.0, 0.0, 0.0, 0.0, asked, 0.0
        return (
            self._loss_sum,
            self._weight_sum,
            float(self._weighted is True),
            float(self._weighted is not None),
            asked,
            0.0,
        )

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Agree on one optimizer's gradients and apply it now; the parts that follow start from zero."""
        trained = self._engine.trained_by(optimizer)
        if self._agree(trained):
            self._engine.begin_update()
            trained.optimizer.step()
        trained.end_update()
        self._total_weight, self._weighted = None, None
        self._loss_sum = self._weight_sum = 0.0

    def finish(self) -> StepRecord:
        """Agree on gradients, update what this step has not updated yet, step the schedules."""
        engine = self._engine
        lr = engine.trained[0].lr
        for trained in engine.trained:
            if not trained.updated:
                if self._agree(trained):
                    engine.begin_update()
                    trained.optimizer.step()
                trained.end_update()
            trained.updated = False
        if self._batch.num_shards:
            engine.end_exact_step(self._apply, self._buffers_changed)
        self.record = StepRecord(
            step=self.number,
            epoch=self.epoch,
            loss=self._loss,
            lr=lr,
            num_samples=self._batch.size,
            grad_norm=self._grad_norm,
            skipped=not self._apply,
        )
        self._on_finish(self.record)
        return self.record

    def _agree(self, trained: Trained) -> bool:
        """Bring gradients and loss together over all ranks; tell whether to apply them."""
        self._count_time()
        if self._weighted is None:  # no backward pass since the last update: there is no gradient
            self._engine.clear_gradients()
        self._end_part()
        self._pulse.beat(Phase.REDUCE)
        loss, weight, num_weighted, num_parts, num_asked, num_changed = trained.reduce(self._sums())
        self._pulse.beat(Phase.UPDATE)
        self._buffers_changed |= num_changed > 0
        self.stop_asked |= num_asked > 0
        if 0 < num_weighted < num_parts:
            raise TaskError("loss gave a weight on some ranks and none on others. Give one always, or never.")
        weighted = num_weighted > 0  # in exact mode a rank may have had no part to know it from
        if self._total_weight is None:  # a second model brings the sums of the same parts again
            self._total_weight = weight
            self._loss = (loss / weight if weight else 0.0) if weighted else loss
            self._apply = math.isfinite(self._loss)
        if weighted and weight:
            trained.reducer.scale(1.0 / weight)
        if self._engine.witness is not None:
            self._engine.witness.gradients(self.number, trained.model)
        spec = self._engine.spec
        if self._apply and spec.clip_norm is not None:
            self._grad_norm = float(trained.reducer.clip(spec.clip_norm))
            self._apply = math.isfinite(self._grad_norm)
        elif self._apply and spec.on_nan == "skip":  # looking at every gradient costs; who asks for it pays
            self._apply = math.isfinite(float(trained.reducer.clip(math.inf)))
        if not self._apply:
            self._engine.refuse_update(self.number, self._loss)
        self._begun, self._waited = time.perf_counter(), self._engine.world.waited_s
        return self._apply

    def _count_time(self) -> None:
        """Add what this rank's parts took; layers that exchange something wait for others meanwhile."""
        waited_s = self._engine.world.waited_s - self._waited
        self._engine.pace.compute_s += time.perf_counter() - self._begun - waited_s


def with_weight(loss: Any) -> tuple[Any, Any]:
    """Give what a Task's loss returned as a mean and a weight, which is None where it gave none."""
    return loss if isinstance(loss, tuple) else (loss, None)


def _not_a_scalar(loss: Any) -> str:
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    return (
        f"loss gave {found}; the mean over the batch, a single number, is needed. "
        "Use .mean(), or reduction='mean' in the loss function."
    )
