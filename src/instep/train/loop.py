"""Train a Task: the loop that a person would write, with `instep.start`'s run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from instep.core.durations import Cadence
from instep.core.errors import TaskError
from instep.data.loader import first_rows
from instep.events.schema import StepRecord
from instep.parallel.capture import Call, call_of
from instep.parallel.noise import NoiseWatch
from instep.parallel.pipeline.stages import Staged
from instep.train.compile import CompiledLoss, LossOf, is_compiled, wants_compiling
from instep.train.origin import find_origin
from instep.train.run import Run
from instep.train.step import Step, with_weight
from instep.train.task import Task, overrides

_EXAMPLE_ROWS = 2


class Loop:
    """Goes through the steps of a Task. Runs alike on all ranks."""

    def __init__(self, run: Run, task: Task) -> None:
        self._run = run
        self._task = task
        self._model, _ = run.prepare(
            lambda: _model_of(task),
            task.optimizer,
            _scheduler_of(task),
            self._example,
            _method(task, "layers"),
            _method(task, "tensor_plan"),
            _method(task, "blocks"),
        )
        if hasattr(task, "state_dict") and hasattr(task, "load_state_dict"):
            run.keep(task=task)
        self._train_data, self._eval_data = task.train_data(), task.eval_data()
        self._cadence = Cadence.parse("eval_every", run.spec.eval_every)
        self._asks_to_stop = overrides(task, "stop")
        self._evaluated_at = -1
        run.find_origin = self._find_origin

    def run(self) -> None:
        """Make all steps that are still to be made, then evaluate and save."""
        task, model = self._task, self._model
        if self._run.engine.witness is not None and self._run.step == 0:
            self._evaluate()
        loss_of: LossOf = task.loss
        if wants_compiling(self._run.engine):
            self._run.compiled = True
            loss_of = CompiledLoss(self._run.engine, task.loss, self._run.notice)
        # Under the watch nothing would be compiled, now or later. In exact mode all noise is the shard's.
        compiled = self._run.compiled or is_compiled(model)
        watch = None if compiled or self._run.spec.exact else NoiseWatch()
        for step in () if self._run.stopped else self._run.steps(self._train_data, collate=task.collate):
            with watch or contextlib.nullcontext():
                step.compute(model, loss_of)
            record = step.finish()
            if watch is not None:
                self._report(watch)
                watch = None
            if self._follow(step, record):
                self._run.stopped = True
                self._run.notice(f"stopped early at step {record.step}, as the Task's stop() asked")
                self._run.compare()
                break
        self._run.close_data()
        self._evaluate()
        if not self._run.is_saved():
            self._run.save()

    def _follow(self, step: Step, record: StepRecord) -> bool:
        """Do what comes after a step; tell whether to stop."""
        if self._is_eval_due(step):
            record = replace(record, metrics=self._evaluate())
        if self._run.is_main:
            self._task.on_step(record)
        if not self._asks_to_stop:
            return False
        return bool(self._run.world.broadcast_object(bool(self._task.stop(record)) if self._run.is_main else None))

    def _is_eval_due(self, step: Step) -> bool:
        if self._eval_data is None:
            return False
        if self._cadence.steps is not None:
            return step.number % self._cadence.steps == 0
        return self._cadence.epochs is not None and step.ends_epoch and (step.epoch + 1) % self._cadence.epochs == 0

    def _evaluate(self) -> dict[str, float]:
        """Evaluate, unless this step's evaluation was made already."""
        if self._eval_data is not None and self._evaluated_at != self._run.step:
            self._evaluated_at = self._run.step
            self._run.evaluate(_metrics_of(self._task), self._eval_data, self._task.collate)
        return self._run.metrics

    def _example(self) -> Call:
        """Find out what the model is called with, from the first rows of the data."""
        batch = first_rows(self._task.train_data(), _EXAMPLE_ROWS, self._task.collate, self._run.spec.seed)
        return call_of(self._task.loss, batch)

    def _find_origin(self, step: Step) -> str:
        if isinstance(self._model, Staged):
            return "In a pipeline it is not looked for where they begin; the same step on strategy=ddp tells."
        return find_origin(step, self._model, lambda *given: with_weight(self._task.loss(*given)), self._run.world)

    def _report(self, watch: NoiseWatch) -> None:
        for text in watch.notices():
            self._run.notice(text)


def _model_of(task: Task) -> nn.Module:
    model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"{type(task).__name__}.model() gave a {type(model).__name__}; a torch.nn.Module is needed.")
    return model


def _scheduler_of(task: Task) -> Callable[..., Any] | None:
    return task.scheduler if overrides(task, "scheduler") else None


def _method(task: Task, name: str) -> Callable[..., Any] | None:
    found = getattr(task, name, None)
    return found if callable(found) else None  # who has a hyper-parameter of that name means a number by it


class _Once:
    """A model that remembers its last answer: loss and metrics of one batch ask for the same."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._arguments: tuple[Any, ...] | None = None
        self._output: Any = None

    def __call__(self, *positional: Any, **named: Any) -> Any:
        known, arguments = self._arguments, (*positional, *named, *named.values())
        if (
            known is None
            or len(known) != len(arguments)
            or any(a is not b for a, b in zip(known, arguments, strict=True))
        ):
            self._arguments, self._output = arguments, self._model(*positional, **named)
        return self._output


def _metrics_of(task: Task) -> Callable[[nn.Module, Any], dict[str, Any]]:
    """The Task's metrics, and its loss as one of them."""

    def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
        once = _Once(model)
        return {"eval_loss": with_weight(task.loss(once, batch)), **task.metrics(once, batch)}

    return metrics
