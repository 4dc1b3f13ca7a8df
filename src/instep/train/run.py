"""A run: what `instep.start` yields, and what `instep train` is written on.

Ranks: all make the same calls in the same order.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import NumericsError, Preempted, TaskError, UnfitCheckpoint
from instep.core.spec import TrainSpec
from instep.core.stop import StopRequest
from instep.data.curricula import Curriculum
from instep.events.schema import NoticeRecord, SaveRecord, StepRecord
from instep.events.write import EventLog
from instep.guard.phase_log import SampleRate
from instep.guard.pulse import Phase, here
from instep.parallel.blocks import Blocks
from instep.parallel.strategy import Example, Layers, LossOf, ModelHints, TensorPlanOf
from instep.train.checkpoint_part import CheckpointPart, data_part, kept_part, platform_part, progress_part, rng_part
from instep.train.compile import CompiledLoss, compile_models, wants_compiling
from instep.train.curriculum import CurriculumScores
from instep.train.directory import describe_own_loop
from instep.train.engine import Engine, Witness
from instep.train.evaluation import MetricsOfModel
from instep.train.first_weights import load_first_weights
from instep.train.fork import Fork, ForkOf, MakeOptimizer
from instep.train.freezing import Freezing, FrozenRule
from instep.train.frozen_weights import FrozenSpec, lacks_weights
from instep.train.lr_schedule import MakeScheduler, schedule_of
from instep.train.memory import PeakMemory
from instep.train.origin import describe_refusal, explain_refusal
from instep.train.pause import is_at_pause
from instep.train.preprocessing import Fit, Preprocessing
from instep.train.reading import BatchReader, Collate
from instep.train.replica_check import ReplicaCheck
from instep.train.run_evaluation import RunEvaluation
from instep.train.run_times import RunTimes
from instep.train.saver import Saver
from instep.train.scalars import EpochMeans
from instep.train.step import Step, StepHooks
from instep.train.train_state import TrainState
from instep.world.seeds import derive, seed_everything
from instep.world.world import World


class Run(RunEvaluation):
    """One training, seen from one rank.

    `own_loop`: it is a loop of one's own, so that `steps` completes the spec and writes spec.json.
    """

    def __init__(
        self,
        world: World,
        spec: TrainSpec,
        directory: RunDirectory,
        log: EventLog,
        name: str,
        stop_request: StopRequest,
        witness: Witness | None,
        own_loop: bool,
        unfit: Sequence[UnfitCheckpoint] = (),
    ) -> None:
        super().__init__(spec)
        self.world = world
        self.is_main = world.is_main
        self.directory = directory
        self.log = log
        self.name = name
        """The Task's, for the log."""
        self.engine = Engine(world, spec, witness, self.notice)
        self._saver = Saver(self.engine.strategy, spec, directory, log, unfit)
        self._replica_check = ReplicaCheck(self.engine, self._saver)
        self._hooks = StepHooks(self._finish_step, self._refuse_step, self._saver.wants, stop_request)
        self.step = self._saver.step
        """Global steps made so far."""
        self.loss = 0.0
        """Of the newest step, the mean over its global batch."""
        self.epoch_means = EpochMeans()
        self.compiled = False
        """Whether what a step computes is compiled."""
        self.stopped = False
        """Whether the Task asked to stop early."""
        self.status: Literal["complete", "preempted"] = "complete"
        """How it ends, when it ends well."""
        self._is_described = not own_loop
        """Whether spec.json describes this run."""
        self._moves: list[str] = []
        """What of the platform has changed since the checkpoint: a sentence each."""
        self._reader: BatchReader | None = None
        self._score_by: MetricsOfModel | None = None
        self._curriculum: CurriculumScores | None = None
        self._freezing: Freezing | None = None
        self._memory = PeakMemory(world.device)
        self._pulse = here()
        about = (world, spec, directory.path, log, self.engine.trained, self.notice)
        self._times = RunTimes(self._pulse, *about)
        self._rng = rng_part()
        self._saver.add(self._rng)
        self._saver.restore(
            progress_part(self),
            platform_part(world.device, self._moves.append),
            CheckpointPart("spec", lambda: asdict(self.spec)),
        )
        # Last: whatever builds a model next, a Task or a loop of one's own, starts from the same generator state.
        seed_everything(derive(spec.seed, "model"))

    def prepare(
        self,
        model: nn.Module | Callable[[], nn.Module],
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None = None,
        example: Example | None = None,
        layers: Layers | None = None,
        tensor_plan: TensorPlanOf | None = None,
        blocks: Blocks | None = None,
        fork_of: ForkOf | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Distribute a model, make its optimizer, and restore both if there is a checkpoint.

        `model` may be a function that builds it, which meta_init needs.
        `make_scheduler(optimizer, num_steps)` is called when the number of steps is known; `example()` returns the
        arguments of a call of the model for a few rows, for strategies that have to look into it; `layers(model)`,
        `tensor_plan(model)` and `blocks(model)` are as in a Task: where a pipeline may cut the model, how its layers
        are split, and what of it is gathered or computed again at a time. `fork_of`: see [Note: Forked runs].
        """
        strategy, is_first = self.engine.strategy, not self.engine.trained
        if not isinstance(model, nn.Module):
            model = strategy.build(model)
        suffix = "" if is_first else f"-{len(self.engine.trained)}"
        if self.spec.init_from is not None and lacks_weights(self._saver.checkpoint) and is_first:
            load_first_weights(model, self.spec.init_from, self.spec.init_partial, self.notice)
        trained = TrainState(
            *(model, make_optimizer, schedule_of(self.spec, make_scheduler), strategy),
            suffix=suffix,
            hints=ModelHints(example, layers, tensor_plan, blocks),
            recompute=self.spec.recompute,
            exact=self.spec.exact,
            channels_last=self.engine.precision.prefers_channels_last,
            ema=self.spec.ema,
            frozen=FrozenSpec.of(self.spec, self._saver.checkpoint, suffix),
            fork=Fork.found_in(self._saver.checkpoint, fork_of, self.spec),
        )
        self._saver.restore(*trained.parts())
        self.engine.trained.append(trained)
        return trained.model, trained.optimizer

    def preprocess(self, fit: Fit) -> dict[str, Any]:
        """Return what `fit()` returned when the run began: a dict of fitted things, as `preprocess` of a Task.

        It is called once, on all ranks, which share the reading; a run that continues has it from its checkpoint.
        """
        preprocessing = Preprocessing()
        self._saver.restore(preprocessing.part())
        if not preprocessing.is_done:
            if self._saver.checkpoint is not None:
                self.notice(
                    "preprocess() is fitted now: the checkpoint that this run continues from holds nothing of it."
                )
            preprocessing.fit(fit, self.world)
        return preprocessing.load()

    def keep(self, **objects: Any) -> None:
        """Checkpoint more objects that have state_dict and load_state_dict, and restore them now."""
        for name, thing in objects.items():
            self._saver.restore(kept_part(name, thing, self.engine.strategy))

    def sync_buffers(self, rules: Mapping[str, str]) -> None:
        """Say how ranks agree on buffers that forward passes change, by name or pattern: mean, sum or rank0."""
        if self.engine.forward_state is not None:
            self.engine.forward_state.set_rules(rules)

    def freeze(self, frozen: FrozenRule) -> None:
        """Freeze parameters of the first model by a rule: `frozen(step, epoch)`, as in a Task."""
        self._freezing = Freezing(frozen, self.engine.trained, self.notice)

    def score_by(self, metrics: MetricsOfModel) -> None:
        """Say how the model scores samples for a curriculum that names a metric: `metrics(model, batch)`, by sample."""
        self._score_by = metrics

    def compile_loss(self, loss_of: LossOf) -> LossOf:
        """Return a Task's loss; where compiling is wanted, `Step.compute` runs it compiled with its model."""
        if not wants_compiling(self.engine):
            return loss_of
        if self.engine.strategy.compiles_blocks:
            return self.engine.compile_loss(loss_of)
        self.compiled = True
        return CompiledLoss(self.engine, loss_of)

    def steps(
        self,
        dataset: Any,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        collate: Collate | None = None,
    ) -> Iterator[Step]:
        """Yield the steps that are still to be made, each with this rank's part of its global batch.

        What is not given comes from the spec. A checkpoint that is due is written between two steps, so that it holds
        what the loop's body did after `finish`, an average of the weights for instance. When the run is asked to stop
        (SIGTERM, SIGUSR1), it saves and raises Preempted, which ends a script with exit code 0.
        """
        if not self.engine.trained:
            raise TaskError("run.steps() before run.prepare(): there is no model to train yet.")
        self._complete_spec(batch_size, epochs, steps)
        self.spec.check_world(self.world.world_size)
        scores = self._prepare_scores(dataset, collate)
        reader = BatchReader(self.engine, self.spec, dataset if scores is None else scores.dataset(), collate)
        reader.follow(self._reader)
        self._reader, plan = reader, reader.loader.plan
        num_steps = self.spec.steps or reader.loader.num_steps(self.spec.resolved_epochs() or 1)
        self._begin(num_steps, reader)
        engine, witness = self.engine, self.engine.witness
        full_batch = min(plan.batch_size, plan.num_samples)
        read = reader.batches if scores is None else partial(scores.batches, reader)
        for batch in read(self.step, num_steps):
            if is_at_pause(self.spec, self.step, batch.epoch):
                self._leave()
            ends_epoch = batch.ends_epoch
            if self._freezing is not None:
                self._freezing.begin_step(batch.step + 1, batch.epoch)
            step = Step(engine, batch, ends_epoch, batch.size == full_batch, self._hooks)
            self._step_plans = [part.plan for part in batch.parts]
            yield step
            self._pulse.beat(Phase.OTHER)
            if reader.has_news(self.step, may_end := ends_epoch or self.step == num_steps):
                reader.log_news(self.step, may_end, self.notice, self.log)
            if step.record is None:
                raise TaskError(f"step {step.number} was not finished: end the loop's body with step.finish().")
            self._saver.check()
            if self._replica_check.is_due(self.step):
                self.compare()
            if step.stop_asked:
                self._leave()
            if self._saver.is_due(self.step, self._scores(), step.save_asked, batch.epoch + 1 if ends_epoch else 0):
                self.save(may_skip=self.spec.save_busy == "skip")
            if witness is not None:
                witness.finished(self.step)
            self._times.next_step(self.step)
        self.compare()
        for sentence in (*engine.strategy.report(), *reader.report()):
            self.notice(sentence)
        self.close_data()

    def _prepare_scores(self, dataset: Any, collate: Collate | None) -> CurriculumScores | None:
        """Return the scores of a curriculum, restored if there is something to restore; None for other data."""
        if not isinstance(dataset, Curriculum):
            return None
        if self._curriculum is None or self._curriculum.curriculum is not dataset:
            self._curriculum = CurriculumScores(self.engine, self.spec, dataset, collate, self._score_by)
            self._saver.restore(self._curriculum.part())
        return self._curriculum

    def _complete_spec(self, batch_size: int | None, epochs: int | None, steps: int | None) -> None:
        """Complete the spec with what a loop of one's own says, and check it against an earlier run."""
        if epochs is not None or steps is not None:
            self.spec = replace(self.spec, epochs=epochs, steps=steps)
        if batch_size is not None:
            self.spec = replace(self.spec, batch_size=batch_size)
        if not self._is_described:
            has_schedule = any(trained.has_schedule for trained in self.engine.trained)
            describe_own_loop(self.world, self.directory, self.name, self.spec, may_extend=not has_schedule)
            self._is_described = True

    def _begin(self, num_steps: int, reader: BatchReader) -> None:
        """Restore what is left to restore, and report what is about to happen. Called on all ranks."""
        loader, plan = reader.loader, reader.loader.plan
        self.engine.begin(plan)
        schedulers = [trained.begin(num_steps) for trained in self.engine.trained]
        self._saver.restore(*filter(None, [*schedulers, data_part(loader)]), self._rng)
        self._saver.end_restore()  # a second call of steps() continues from here
        self.log.write(reader.describe_plan(self.name, self.step, num_steps))
        if not self.compiled and wants_compiling(self.engine):
            self.compiled = True
            compile_models(self.engine)
        for sentence in self.engine.notices(self.spec, self.compiled, plan.batch_size):
            self.notice(sentence)
        if plan.batch_size > plan.num_samples:
            self.notice(f"batch_size={plan.batch_size} is more than the {plan.num_samples} samples: each batch is all.")
        while self._moves and self.spec.exact:
            self.notice(self._moves.pop())
        if self.engine.witness is not None:
            self.engine.witness.begin(self.engine.trained[0].model)
        self._times.begin_steps(self.step, num_steps, reader.source.take_depth)

    def check_goals(self, metrics: Collection[str]) -> None:
        """Raise TaskError if an option names none of these metrics."""
        self._saver.check_best(metrics)
        if self.patience is not None:
            self.patience.goal.check(metrics)

    def compare(self) -> None:
        """Compare the ranks' state ([Note: Drift]); raise if it differs. Called on all ranks."""
        self._replica_check.compare(self.step)

    def save(self, may_skip: bool = False) -> None:
        """Take a checkpoint of this moment; it is written while the training continues. Called on all ranks.

        `may_skip`: not if the last one is still being written.
        """
        with self._pulse.during(Phase.SAVE):
            self._saver.save(self.step, self._scores(), may_skip)

    def save_last(self) -> None:
        """Take a checkpoint of this moment, unless this step's was taken already. Called on all ranks."""
        if not self._saver.is_saved(self.step):
            self.save()

    def take_saves(self) -> list[SaveRecord]:
        """Return the checkpoints that were completed since the last call; on rank 0."""
        saves, self._saver.new_saves = self._saver.new_saves, []
        return saves

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete."""
        with self._pulse.during(Phase.SAVE):
            self._saver.finish()

    def stop_early(self, reason: str) -> None:
        """Note that the run stops early, and is then complete. Called on all ranks."""
        self.stopped = True
        self.notice(f"stopped early at step {self.step}: {reason}")
        self.compare()

    def notice(self, text: str) -> None:
        """Log something that a person should know, once for all ranks."""
        if self.is_main:
            self.log.write(NoticeRecord(text=text))

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch; 0 before `steps` is called, and where it is not known."""
        return self._reader.loader.steps_per_epoch or 0 if self._reader is not None else 0

    @property
    def epochs(self) -> int:
        """Epochs completed so far."""
        return self._reader.loader.epochs(self.step) if self._reader is not None else 0

    def close_data(self) -> None:
        """End the processes that load samples."""
        if self._reader is not None:
            self._reader.source.close()

    def sample_rate(self) -> SampleRate | None:
        """Return how many samples this rank has computed since its start, and the time; None before there are any."""
        return self._times.rate

    def end_phases(self) -> None:
        """Log where the rest of this rank's time went."""
        self._times.close(self.step)

    def close(self) -> None:
        """Release models and data; the process group is left after this."""
        self.close_data()
        self._saver.close()
        self.engine.trained.clear()

    def _leave(self) -> NoReturn:
        """Save and end the run early: the ranks agreed that one of them was asked to stop, or the spec says so."""
        self.compare()
        where = f"step {self.step} in {self.directory.path}"
        self.notice(f"asked to stop: saving at {where}, from where the run continues.")
        self.save_last()
        self.finish_saving()
        self.close_data()
        self.status = "preempted"
        raise Preempted(self._hooks.stop_request.interrupted)

    def _finish_step(self, record: StepRecord, ends_epoch: bool, num_rows: int) -> None:
        self.step, self.loss = record.step, record.loss
        self._hooks.stop_request.begin()
        self._times.end_step(self.step, num_rows)
        epoch = self.epoch_means.take(record, ends_epoch)
        if self.is_main:
            if (self.log.step(record) or epoch) and (memory := self._memory.new_peak(self.step)):
                self.log.write(memory)
            if epoch is not None:
                self.log.write(epoch)

    def _refuse_step(self, step: Step, loss: float) -> None:
        """Report a step whose loss or gradient is not finite, or raise. Called on all ranks."""
        assert self._reader is not None
        text = describe_refusal(step.number, loss, self._reader.sample_indices(step.number - 1).tolist())
        if self.spec.on_nan == "skip":
            return self.notice(f"{text} This update is skipped.")
        raise NumericsError(explain_refusal(text, step, self.engine, self._saver))
