"""Train a Task: the loop that a person would write, with `instep.start`'s run."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from instep.core.durations import Cadence
from instep.events.schema import Record, StepRecord
from instep.parallel.noise import NoiseWatch
from instep.parallel.strategy import LossOf
from instep.train.compile import is_compiled
from instep.train.data_check import DataCheck
from instep.train.flops import log_flops
from instep.train.fork import Fork
from instep.train.lr_schedule import check_schedule
from instep.train.metric_objects import prepare_metrics
from instep.train.model_files import SaveFiles, configs_of, write_files
from instep.train.preprocessing import fitting_with, save_fitted, set_fitted
from instep.train.run import Run
from instep.train.step import Step
from instep.train.task import Task, field_names, overrides
from instep.train.task_calls import example_of, method_of, metrics_of, model_of, train_data_of
from instep.train.trial import copy_of, try_difficulty, try_loss, try_metrics


class Loop:
    """Makes the steps of a Task. Runs alike on all ranks.

    `saves`: whether there is a checkpoint at the end; a training that is only measured needs none.
    """

    def __init__(self, run: Run, task: Task, saves: bool = True) -> None:
        self._run = run
        self._task = task
        self._saves = saves
        if "run_dir" not in field_names(type(task)):
            object.__setattr__(task, "run_dir", run.directory.path)  # a Task may be frozen
        files: list[SaveFiles] = [task.save_files] if overrides(task, "save_files") else []

        if (preprocess := method_of(task, "preprocess")) is not None:
            set_fitted(task, run.preprocess(preprocess))
            files.append(partial(save_fitted, task.fitted))

        def build() -> nn.Module:
            model = model_of(task)
            files[:0] = configs_of(model)
            return model

        self._model, _ = run.prepare(
            build,
            task.optimizer,
            task.scheduler if overrides(task, "scheduler") else None,
            partial(example_of, task, run.spec.seed),
            method_of(task, "layers"),
            method_of(task, "tensor_plan"),
            method_of(task, "blocks"),
            partial(Fork.of, task),
        )
        if run.is_main:
            write_files(run.directory.path, files)
        if hasattr(task, "state_dict") and hasattr(task, "load_state_dict"):
            run.keep(task=task)
        self._data_check = DataCheck()
        run.keep(data=self._data_check)
        if (rules := method_of(task, "sync_buffers")) is not None:
            run.sync_buffers(rules())
        if (frozen := method_of(task, "frozen")) is not None:
            run.freeze(frozen)
        with fitting_with(run.world):
            self._train_data, self._eval_data = train_data_of(task, run.notice), task.eval_data()
        run.score_by(lambda model, batch: copy_of(task).metrics(model, batch))
        self._cadence = Cadence.parse("eval_every", run.spec.eval_every)
        self._evaluates = self._eval_data is not None and self._cadence != Cadence()
        """Whether there are evaluations between steps."""
        self._asks_to_stop = overrides(task, "stop")
        self._on_step = task.on_step if overrides(task, "on_step") else None
        self._evaluated_at = -1

    def run(self) -> None:
        """Make all steps that are still to be made, then evaluate and save."""
        run, model = self._run, self._model
        with self._saves_reported_if_preempted():
            self._check_before_training()
            loss_of = run.compile_loss(self._task.loss)
            # Under a watch nothing would be compiled, now or later.
            is_watched = not run.compiled and not run.engine.must_look and not is_compiled(model)
            goal, noise = run.goal, None
            is_first, step = True, None
            for step in () if run.stopped else run.steps(self._train_data, collate=self._task.collate):
                if is_first:
                    check_schedule(run.engine.trained[0].schedule, goal, self._evaluates)
                    noise = self._compute_first(step, loss_of, is_watched)
                else:
                    step.compute(model, loss_of)
                record = step.finish()
                for text in noise.notices() if is_first and noise is not None else ():
                    run.notice(text)
                is_first = False
                if reason := self._follow(step, record):
                    run.stop_early(reason)
                    break
            self._end(step)

    def _check_before_training(self) -> None:
        """Compare the ranks' data and try the Task's functions, unless a witness does so itself."""
        run, task = self._run, self._task
        if run.engine.witness is not None:
            if run.step == 0:
                self._evaluate()
            return
        if run.stopped:
            return
        self._data_check.compare(run, self._train_data, task.collate)
        if run.step == 0 and run.engine.strategy.calls_model:
            try_loss(run, task, self._model, self._train_data)
            try_difficulty(run, task, self._model, self._train_data)
            if self._eval_data is not None:
                prepare_metrics(vars(task).values(), run.world.device)
                try_metrics(run, partial(metrics_of, copy_of(task)), self._eval_data, task.collate)

    def _compute_first(self, step: Step, loss_of: LossOf, is_watched: bool) -> NoiseWatch | None:
        """Compute the first step under the watches for noise and state, if it is watched; return that for noise."""
        engine = self._run.engine
        noise = NoiseWatch() if is_watched and not self._run.spec.exact else None  # in exact mode it is the shard's
        with contextlib.ExitStack() as watches:
            if noise is not None:
                watches.enter_context(noise)
            if is_watched and engine.forward_state is not None and not engine.forward_state.is_checked:
                watches.enter_context(engine.forward_state.watch)
            step.compute(self._model, loss_of)
        return noise

    def _end(self, last: Step | None) -> None:
        """Evaluate and save after the last step, if this process made one."""
        run = self._run
        if last is not None and run.engine.witness is None:
            log_flops(run, last)
        run.close_data()
        self._evaluate()
        if self._saves:
            run.save_last()
        run.finish_saving()
        self._report_saves()

    @contextlib.contextmanager
    def _saves_reported_if_preempted(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._run.status == "preempted":
                self._report_saves()

    def _follow(self, step: Step, record: StepRecord) -> str:
        """Evaluate if due, and call the Task's hooks; return why to stop, or nothing."""
        if self._evaluates and self._is_eval_due(step):
            record = replace(record, metrics=self._evaluate())
        if self._on_step is not None:
            self._call_hook(self._on_step, record)
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
        if self._cadence.steps is not None:
            return step.number % self._cadence.steps == 0
        return self._cadence.epochs is not None and step.ends_epoch and (step.epoch + 1) % self._cadence.epochs == 0

    def _evaluate(self) -> dict[str, float]:
        """Evaluate, unless this step was evaluated already."""
        if self._eval_data is not None and self._evaluated_at != self._run.step:
            self._evaluated_at = self._run.step
            prepare_metrics(vars(self._task).values(), self._run.world.device)
            self._run.evaluate(partial(metrics_of, self._task), self._eval_data, self._task.collate)
            assert self._run.evaluation is not None
            self._call_hook(self._task.on_eval, self._run.evaluation)
        return self._run.metrics
