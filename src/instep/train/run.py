"""A run: what `instep.start` gives, and what `instep train` is written on.

Ranks: all of them make the same calls in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights
from instep.core.errors import CheckpointError, NumericsError, Preempted, TaskError
from instep.core.spec import TrainSpec
from instep.data.loader import GlobalBatch, LoadOptions, TrainLoader, evaluation_chunks, num_samples
from instep.data.order import BatchPlan, SampleOrder
from instep.events.schema import EvalRecord, NoticeRecord, PlanRecord, StepRecord
from instep.events.write import EventLog
from instep.guard.pulse import Phase, here
from instep.parallel.blocks import Blocks
from instep.parallel.gradients import to_local
from instep.parallel.strategy import Example, Layers, TensorPlanOf
from instep.train.choices import describe_choices
from instep.train.compile import compile_model, wants_compiling
from instep.train.directory import agree_on_directory, describe_run
from instep.train.engine import Engine
from instep.train.evaluate import evaluate
from instep.train.precision import resolve_precision
from instep.train.replica_check import ReplicaCheck
from instep.train.saver import Saver
from instep.train.step import Step
from instep.train.train_state import MakeOptimizer, MakeScheduler, TrainState
from instep.train.witness import Witness
from instep.world.seeds import derive, seed_everything
from instep.world.world import World

Collate = Callable[[list[Any]], Any]


class Run:
    """One training, seen from one rank."""

    def __init__(
        self, world: World, spec: TrainSpec, directory: RunDirectory, log: EventLog, name: str = "loop"
    ) -> None:
        spec = resolve_precision(spec, world.device)
        self.world = world
        self.name = name
        """The Task's, for the log."""
        self.is_main = world.is_main
        self.spec = spec
        self.directory = directory
        self.metrics: dict[str, float] = {}
        """What the newest evaluation gave."""
        self.find_origin: Callable[[Step], str] | None = None
        """Says where a step's numbers ceased to be finite, before the run ends with it. Called on all ranks."""
        self._evaluated_at: int | None = None
        self.log = log
        self.engine = Engine(world, spec)
        self.engine.on_nan = self._on_nan
        self.engine.say = self.notice
        self._saver = Saver(self.engine.grid, spec, directory, log)
        self.engine.wants_save = self._saver.wants
        self._replica_check = ReplicaCheck(self.engine.grid, spec, self._saver, self.engine.pace, self.notice)
        if self.engine.loss_scale is not None and "loss_scale" in self._saver.progress:
            self.engine.loss_scale.restore(self._saver.progress["loss_scale"])
        self.compiled = False
        """Whether what a step computes is compiled."""
        self._loader: TrainLoader | None = None
        self._step: Step | None = None
        """The one under way."""
        self.step = self._saver.step
        """Global steps made so far."""
        self._pulse = here()
        self._doubted: set[str] = set()
        self.stopped = bool(self._saver.progress.get("stopped"))
        """Whether the Task asked to stop early."""
        self.preempted = False
        """Whether it ends early because somebody asked it to."""
        self.settled = True
        """Whether spec.json says what this run is; for a loop of one's own, `steps` finds out."""
        self.steps_per_epoch = 0
        self.loss = float(self._saver.progress.get("loss") or 0.0)
        """Of the newest step, the mean over its global batch."""
        # Last: whoever builds a model next, a Task or a loop of one's own, finds the same generator.
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
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Spread a model, make its optimizer, and restore both if there is something to restore.

        `model` may be a function that builds it, which meta_init needs.
        `make_scheduler(optimizer, num_steps)` is called when the number of steps is known; `example()` gives the
        arguments of a call of the model for a few rows, for strategies that have to look into it; `layers(model)` says
        where a pipeline may cut it, `tensor_plan(model)` how its layers are split, and `blocks(model)` what of it is
        gathered or computed again at a time, as in a Task.
        """
        if not isinstance(model, nn.Module):
            model = self.engine.strategy.build(model)
        strategy = self.engine.strategy
        strategy.layers, strategy.tensor_plan, strategy.blocks = layers, tensor_plan, blocks
        suffix = f"-{len(self.engine.trained)}" if self.engine.trained else ""
        if self.spec.init_from is not None and self._saver.checkpoint is None and not self.engine.trained:
            _load_into(model, Path(self.spec.init_from))
        trained = TrainState(
            *(model, make_optimizer, make_scheduler, self.engine.strategy, suffix, example),
            recompute=self.spec.recompute,
            exact=self.spec.exact,
        )
        if self._saver.checkpoint is not None:
            trained.restore(self._saver.checkpoint)
        self.engine.trained.append(trained)
        return trained.model, trained.optimizer

    def keep(self, **objects: Any) -> None:
        """Checkpoint more things that have state_dict and load_state_dict, and restore them now."""
        for name, thing in objects.items():
            self._saver.keep(name, thing)

    def steps(
        self,
        dataset: Any,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        collate: Collate | None = None,
    ) -> Iterator[Step]:
        """Give the steps that are still to be made, each with this rank's part of its global batch.

        What is not given comes from the spec. A checkpoint that is due is written between two steps, so
        that it holds what the loop's body did after `finish`, an average of the weights for instance. Asked to
        stop (SIGTERM, SIGUSR1), it saves and raises Preempted, which ends a script with exit code 0.
        """
        if not self.engine.trained:
            raise TaskError("run.steps() before run.prepare(): there is no model to train yet.")
        self._settle(batch_size, epochs, steps)
        plan = self._plan(num_samples(dataset, collate))
        num_steps = self.spec.steps or plan.num_batches * (self.spec.resolved_epochs() or 1)
        self._loader = self._load_from(dataset, plan, collate)
        self._begin(plan, num_steps)
        witness = self.engine.witness
        for batch in self._timed(self._loader.steps(self.step, num_steps)):
            ends_epoch = (batch.step + 1) % plan.num_batches == 0
            if witness is not None:
                self._show(batch, witness)
            step = self._step = Step(self.engine, batch, ends_epoch, self._finish_step)
            yield step
            self._pass_on_notices()
            if step.record is None:
                raise TaskError(f"step {step.number} was not finished: end the loop's body with step.finish().")
            self._saver.look(self.engine.trained)
            if self._replica_check.is_due(self.step):
                self.compare()
            if step.stop_asked:
                self._leave()
            if self._saver.is_due(self.step, self._scores(), step.save_asked):
                self._save(may_skip=self.spec.save_busy == "skip")
            if witness is not None:
                witness.finished(self.step)
            self._pulse.beat(Phase.DATA)
        self.compare()
        for sentence in self.engine.strategy.report():
            self.notice(sentence)
        self.close_data()

    def _begin(self, plan: BatchPlan, num_steps: int) -> None:
        """Bring all to where the steps begin, and say what is about to happen. Called on all ranks."""
        self.steps_per_epoch = plan.num_batches
        self.engine.context.smallest_part = self.engine.strategy.smallest_part(plan.smallest_part)
        self.engine.full_batch = min(plan.batch_size, plan.num_samples)
        for trained in self.engine.trained:
            trained.begin(num_steps, self._saver.checkpoint)
        self._saver.restore_rng()
        moved = self._saver.moved
        self._saver.checkpoint = None  # taken over; a second call of steps() goes on from here
        self._log_plan(plan, num_steps)
        if not self.compiled and wants_compiling(self.engine):
            self.compiled = True
            for trained in self.engine.trained:
                compile_model(trained.model, self.engine, self.notice)
        self._warn(moved)
        if self.engine.witness is not None:
            self.engine.witness.begin(self.engine.trained[0].model)
        self._pulse.begin_steps(self.step)

    def evaluate(
        self,
        metrics: Callable[[nn.Module, Any], dict[str, Any]],
        dataset: Any,
        collate: Collate | None = None,
    ) -> dict[str, float]:
        """Compute metrics exactly over a whole set; `metrics(model, batch)` as in a Task."""
        begun = time.monotonic()
        model = self.engine.trained[0].model
        was_training = [module.training for module in model.modules()]
        model.eval()
        put_back = _buffers_of(model)

        self._pulse.beat(Phase.EVALUATE)

        def metrics_of(batch: Any) -> dict[str, Any]:
            self._pulse.beat(Phase.EVALUATE)
            with self.engine.precision.autocast():
                found = metrics(model, batch)
            put_back()  # which chunks a rank has gone through before must not matter, now or later
            return found

        self.engine.context.end_part()
        with torch.no_grad():
            chunks = self._chunks(dataset, collate)
            found = evaluate(metrics_of, chunks, self.engine.grid.data, self.spec.exact)
        for module, training in zip(model.modules(), was_training, strict=True):  # one may be frozen in eval mode
            module.training = training
        self.metrics, self._evaluated_at = found, self.step
        seconds = round(time.monotonic() - begun, 6)
        self.log.write(EvalRecord(step=self.step, metrics=found, seconds=seconds))
        return found

    def compare(self) -> None:
        """Find out whether all ranks hold the same ([Note: Drift]); raise if they do not. Called on all ranks."""
        self._replica_check.compare(self.step, self.engine.trained)

    def save(self) -> None:
        """Take a checkpoint of this moment; it is written beside the training. Called on all ranks."""
        self._save(may_skip=False)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete."""
        self._saver.finish()

    def is_saved(self) -> bool:
        """Tell whether this step's checkpoint was written already. Called on all ranks."""
        return self._saver.is_saved(self.step)

    def notice(self, text: str) -> None:
        """Say something that a person should know, once for all ranks."""
        if self.is_main:
            self.log.write(NoticeRecord(text=text))

    @property
    def epochs(self) -> int:
        """Epochs gone through so far."""
        return self.step // self.steps_per_epoch if self.steps_per_epoch else 0

    @property
    def status(self) -> Literal["complete", "preempted"]:
        """How it ends, when it ends well."""
        return "preempted" if self.preempted else "complete"

    def close_data(self) -> None:
        """End the processes that load samples."""
        if self._loader is not None:
            self._loader.close()

    def close(self) -> None:
        """Let go of models and data; the process group is left after this."""
        self.close_data()
        self._saver.close()
        self.engine.trained.clear()

    def _leave(self) -> NoReturn:
        """Save and end the run early, because this step's ranks agreed that one of them was asked to stop."""
        self.compare()
        self.notice(f"asked to stop: saving at step {self.step}. The same command goes on from there.")
        if not self.is_saved():
            self.save()
        self.finish_saving()
        self.close_data()
        self.preempted = True
        raise Preempted

    def _save(self, may_skip: bool) -> None:
        self._pulse.beat(Phase.SAVE)
        self._saver.save(self.step, self.engine.trained, self._progress(), self._scores(), may_skip)

    def _timed(self, batches: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        """Note how long this rank waits for its data, and how much there is."""
        pace, begun = self.engine.pace, time.perf_counter()
        for batch in batches:
            pace.data_s += time.perf_counter() - begun
            pace.num_steps += 1
            pace.num_rows += sum([part.plan.num_rows for part in batch.parts])
            yield batch
            begun = time.perf_counter()

    def _finish_step(self, record: StepRecord) -> None:
        self.step, self.loss = record.step, record.loss
        self._pulse.end_step(self.step)
        if self.is_main:
            self.log.step(record)

    def _pass_on_notices(self) -> None:
        assert self._loader is not None
        doubts = self.engine.context.doubts
        while self._loader.notices:
            self.notice(self._loader.notices.pop(0))
        for name in [name for name in doubts if name not in self._doubted]:
            self._doubted.add(name)
            self.notice(doubts[name])

    def _show(self, batch: GlobalBatch, witness: Witness) -> None:
        assert self._loader is not None
        indices = self._loader.sample_indices(batch.step).tolist()
        for part in batch.parts:
            first = part.plan.first_row
            witness.part(batch.step + 1, part.plan, indices[first : first + part.plan.num_rows], part.batch)

    def _on_nan(self, step: int, loss: float) -> None:
        assert self._loader is not None
        indices = self._loader.sample_indices(step - 1).tolist()
        shown = ", ".join(map(str, indices[:16])) + (f", … ({len(indices)} in all)" if len(indices) > 16 else "")
        what = f"the loss of step {step} is {loss}" if loss - loss else f"the gradient of step {step} is not finite"
        found = f"{what}. Its samples: {shown}."
        if self.spec.on_nan == "skip":
            return self.notice(f"{found} This update is skipped.")
        if self.find_origin is not None and self._step is not None:
            found += " " + self.find_origin(self._step)
        self._saver.close()  # the checkpoint that is named may still be on its way
        # All ranks wait for it: the first to leave would have rank 0 ended while it writes.
        newest = self.world.broadcast_object(self._saver.newest() if self.is_main else None)
        raise NumericsError(
            f"{found} This update was not made{self._already_lost()}. {newest} "
            "Look at those samples, lower the learning rate, set --clip-norm, or use --on-nan skip."
        )

    def _already_lost(self) -> str:
        weights = [p for trained in self.engine.trained for p in trained.model.parameters()]
        own = not all(bool(torch.isfinite(to_local(p)).all()) for p in weights)
        lost = any(self.world.all_gather_object(own))  # each may hold a piece only
        return ", but the weights are not finite either: an earlier gradient was not" if lost else ""

    def _scores(self) -> dict[str, float]:
        """This step's evaluation, if there was one."""
        return self.metrics if self._evaluated_at == self.step else {}

    def _progress(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.epochs,
            "loss": self.loss,
            "metrics": self.metrics,
            "stopped": self.stopped,
            **({} if self.engine.loss_scale is None else {"loss_scale": self.engine.loss_scale.state()}),
        }

    def _settle(self, batch_size: int | None, epochs: int | None, steps: int | None) -> None:
        """Complete the spec with what a loop of one's own says, and check it against an earlier run."""
        given: dict[str, Any] = {"batch_size": batch_size, "epochs": epochs, "steps": steps}
        given = {name: value for name, value in given.items() if value is not None}
        if "epochs" in given or "steps" in given:
            given = {"epochs": None, "steps": None, **given}
        self.spec = self.engine.spec = self._saver.spec = replace(self.spec, **given)
        if not self.settled:
            description = describe_run({"name": self.name, "fields": {}}, self.spec)
            has_schedule = any(trained.has_schedule for trained in self.engine.trained)

            def decide() -> RunDirectory:
                self.directory.write_spec(description, may_extend=not has_schedule)
                return self.directory

            agree_on_directory(self.world, decide)
            self.settled = True

    def _plan(self, count: int) -> BatchPlan:
        self.spec.check_world(self.world.world_size)
        return BatchPlan(
            num_samples=count,
            batch_size=self.spec.batch_size,
            accumulate=self.spec.accumulate,
            drop_last=self.spec.drop_last,
            shards=self.spec.num_shards,
        )

    def _load_from(self, dataset: Any, plan: BatchPlan, collate: Collate | None) -> TrainLoader:
        return TrainLoader(dataset, plan, SampleOrder(self.spec.seed, plan.num_samples), self._load_options(collate))

    def _chunks(self, dataset: Any, collate: Collate | None) -> Iterator[tuple[Any, int]]:
        # From the spec alone, so that every sample is computed in the same company at any world size. Not more
        # than an eighth of a batch: without gradients that fits where a training step's share does.
        rows = -(-self.spec.batch_size // (8 * self.spec.accumulate))
        in_step = self.engine.strategy.in_step
        return evaluation_chunks(dataset, rows, self._load_options(collate), in_step=in_step)

    def _load_options(self, collate: Collate | None) -> LoadOptions:
        return LoadOptions(
            rank=self.engine.grid.data.rank,
            world_size=self.engine.grid.data.world_size,
            local_world_size=self.world.place.local_world_size,
            device=self.world.device,
            collate=collate,
            workers=self.spec.data_workers,
            seed=self.spec.seed,
        )

    def _warn(self, moved: str) -> None:
        """Say what of this run a person may not expect; `moved`: what of the platform is new."""
        if self.world.world_size == 1 and self.spec.strategy in ("fsdp", "tensor", "pipeline"):
            self.notice(
                f"strategy={self.spec.strategy} on one process: there is nothing to spread; as strategy=single."
            )
        rows = self.spec.batch_size // self.spec.accumulate // self.engine.grid.mesh.data_size
        for sentence in self.engine.strategy.notices(max(1, rows)):
            self.notice(sentence)
        if choices := describe_choices(self.engine, self.compiled):
            self.notice(choices)
        if self.spec.recompute and not any(trained.recomputed for trained in self.engine.trained):
            self.notice("recompute: the model has no repeated blocks, so nothing is computed twice.")
        if self.spec.exact and moved:
            self.notice(
                f"exact mode: this run goes on with {moved}. Kernels may round differently "
                "there, so its weights may not be those of a run that stayed."
            )
        if self.spec.accumulate > 1 and not self.spec.exact and self.engine.has_batch_norm():
            self.notice(
                f"BatchNorm's statistics cover one part of a batch, so accumulate={self.spec.accumulate} is another "
                "recipe than accumulate=1 (at any number of processes)."
            )

    def _log_plan(self, plan: BatchPlan, num_steps: int) -> None:
        assert self._loader is not None
        model = self.engine.trained[0].model
        self.log.write(
            PlanRecord(
                task=self.name,
                strategy=self.engine.strategy.name,
                first_step=self.step,
                num_steps=num_steps,
                num_epochs=-(-num_steps // plan.num_batches),
                steps_per_epoch=plan.num_batches,
                batch_size=plan.batch_size,
                num_samples=plan.num_samples,
                num_parameters=self.engine.strategy.num_parameters(model),
                reading=self._loader.describe(),
            )
        )


def _buffers_of(model: nn.Module) -> Callable[[], None]:
    """Remember a model's buffers; give what puts them back as they are now."""
    named = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    kept = [(*each, each[2].detach().clone()) for each in named]

    def put_back() -> None:
        for module, name, buffer, value in kept:
            if module._buffers[name] is not buffer or not torch.equal(buffer, value):
                module._buffers[name] = buffer
                buffer.copy_(value)

    return put_back


def _load_into(model: nn.Module, source: Path) -> None:
    try:
        model.load_state_dict(load_weights(source))
    except RuntimeError as error:
        raise CheckpointError(f"init_from={source}: these weights do not fit the model: {error}") from error
