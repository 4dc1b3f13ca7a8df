"""Train a Task: the loop that a person would write, with `instep.start`'s run."""

import contextlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from instep.core.durations import Cadence
from instep.core.errors import TaskError
from instep.data.kinds import first_rows
from instep.events.schema import Record, StepRecord
from instep.parallel.capture import Call, call_of
from instep.parallel.noise import NoiseWatch
from instep.parallel.noise_patches import torchs_own_functions
from instep.train.compile import is_compiled
from instep.train.lr_schedule import check_schedule
from instep.train.metric_objects import prepare_metrics
from instep.train.run import Run
from instep.train.scalars import loss_parts
from instep.train.step import Step
from instep.train.task import Task, field_names, overrides
from instep.train.trial import copy_of, try_loss, try_metrics

_EXAMPLE_ROWS = 2


class Loop:
    """Makes the steps of a Task. Runs alike on all ranks."""

    def __init__(self, run: Run, task: Task) -> None:
        self._run = run
        self._task = task
        if "run_dir" not in field_names(type(task)):
            object.__setattr__(task, "run_dir", run.directory.path)  # a Task may be frozen
        self._model, _ = run.prepare(
            lambda: _model_of(task),
            task.optimizer,
            task.scheduler if overrides(task, "scheduler") else None,
            self._example,
            _method(task, "layers"),
            _method(task, "tensor_plan"),
            _method(task, "blocks"),
        )
        if hasattr(task, "state_dict") and hasattr(task, "load_state_dict"):
            run.keep(task=task)
        if (rules := _method(task, "sync_buffers")) is not None:
            run.sync_buffers(rules())
        self._train_data, self._eval_data = task.train_data(), task.eval_data()
        self._cadence = Cadence.parse("eval_every", run.spec.eval_every)
        self._asks_to_stop = overrides(task, "stop")
        self._evaluated_at = -1

    def run(self) -> None:
        """Make all steps that are still to be made, then evaluate and save."""
        try:
            self._train()
        finally:
            if self._run.status == "preempted":
                self._report_saves()

    def _train(self) -> None:
        run, task, model = self._run, self._task, self._model
        witness = run.engine.witness  # it reports itself what this would refuse
        if run.step == 0 and run.engine.strategy.calls_model and not run.stopped and witness is None:
            try_loss(run, task, model, self._train_data)
            if self._eval_data is not None:
                prepare_metrics(vars(task).values(), run.world.device)
                try_metrics(run, partial(_metrics, copy_of(task)), self._eval_data, task.collate)
        if witness is not None and run.step == 0:
            self._evaluate()
        loss_of = run.compile_loss(task.loss)
        # Under a watch nothing would be compiled, now or later. In exact mode all noise is the shard's.
        is_watched = not run.compiled and not is_compiled(model)
        watch = NoiseWatch() if is_watched and not run.spec.exact else None
        state = run.engine.forward_state
        goal, evaluates = run.goal, self._eval_data is not None and self._cadence != Cadence()
        for step in () if run.stopped else run.steps(self._train_data, collate=task.collate):
            check_schedule(run.engine.trained[0].schedule, goal, evaluates)
            with contextlib.ExitStack() as watches:
                if watch is not None:
                    watches.enter_context(watch)
                if is_watched and state is not None and not state.is_checked:
                    watches.enter_context(state.watch)
                step.compute(model, loss_of)
                is_watched = False
            record = step.finish()
            if watch is not None:
                for text in watch.notices():
                    run.notice(text)
                watch = None
            if reason := self._follow(step, record):
                run.stop_early(reason)
                break
        run.close_data()
        self._evaluate()
        run.save_last()
        run.finish_saving()
        self._report_saves()

    def _follow(self, step: Step, record: StepRecord) -> str:
        """Evaluate if due, and call the Task's hooks; return why to stop, or nothing."""
        if self._is_eval_due(step):
            record = replace(record, metrics=self._evaluate())
        self._call_hook(self._task.on_step, record)
        self._report_saves()
        patience = self._run.patience
        if patience is not None and patience.is_over:
            return patience.describe()
        if not self._asks_to_stop:
            return ""
        stops = self._run.world.broadcast_object(bool(self._task.stop(record)) if self._run.is_main else None)
        return "the Task's stop() asked for it" if stops else ""

    def _report_saves(self) -> None:
        for record in self._run.take_saves():
            self._call_hook(self._task.on_save, record)

    def _call_hook(self, hook: Callable[[Any], object], record: Record) -> None:
        """Call a hook of the Task on rank 0; what it raises says whose it is."""
        if not self._run.is_main:
            return
        try:
            hook(record)
        except Exception as error:
            error.add_note(f"Raised by {type(self._task).__name__}.{hook.__name__}(), which instep calls on rank 0.")
            raise

    def _is_eval_due(self, step: Step) -> bool:
        if self._eval_data is None:
            return False
        if self._cadence.steps is not None:
            return step.number % self._cadence.steps == 0
        return self._cadence.epochs is not None and step.ends_epoch and (step.epoch + 1) % self._cadence.epochs == 0

    def _evaluate(self) -> dict[str, float]:
        """Evaluate, unless this step was evaluated already."""
        if self._eval_data is not None and self._evaluated_at != self._run.step:
            self._evaluated_at = self._run.step
            prepare_metrics(vars(self._task).values(), self._run.world.device)
            self._run.evaluate(partial(_metrics, self._task), self._eval_data, self._task.collate)
            assert self._run.evaluation is not None
            self._call_hook(self._task.on_eval, self._run.evaluation)
        return self._run.metrics

    def _example(self) -> Call:
        """Return the arguments that the model is called with, for the first rows of the data."""
        batch, _ = first_rows(self._task.train_data(), _EXAMPLE_ROWS, self._task.collate, self._run.spec.seed)
        return call_of(self._task.loss, batch)


def _model_of(task: Task) -> nn.Module:
    with torchs_own_functions():  # which torch.jit.script knows
        model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"{type(task).__name__}.model() gave a {type(model).__name__}; a torch.nn.Module is needed.")
    return model


def _metrics(task: Task, model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return a Task's metrics, with its loss as one of them."""
    once = _Once(model)
    (mean, weight, scalars), values = loss_parts(task.loss(once, batch)), task.metrics(once, batch)
    if not isinstance(values, Mapping):
        raise TaskError(f"metrics returned a {type(values).__name__}; a dict of metrics by name is needed.")
    of_loss = {"loss": mean, **(scalars or {})}
    return {**{f"eval_{name}": (value, weight) for name, value in of_loss.items()}, **values}


def _method(task: Task, name: str) -> Callable[..., Any] | None:
    method = getattr(task, name, None)
    return method if callable(method) else None  # a hyper-parameter of that name is a number


class _Once:
    """A model that remembers its last answer: loss and metrics of one batch ask for the same."""

    training = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._arguments: tuple[Any, ...] | None = None
        self._output: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        known, arguments = self._arguments, (*positional, *named, *named.values())
        if known is None or len(known) != len(arguments) or not all(map(operator.is_, known, arguments)):
            self._arguments, self._output = arguments, self._model(*positional, **named)
        return self._output
