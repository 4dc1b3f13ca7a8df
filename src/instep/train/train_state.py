"""A model with its optimizer and its schedule: what one training changes."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.reader import StoredTensor, map_stored
from instep.checkpoint.shards import read_for_parameter, reshard
from instep.core.errors import CheckpointError, TaskError
from instep.parallel.recompute import recompute_blocks
from instep.parallel.shard_buffers import ShardBuffers
from instep.parallel.strategy import Example, Strategy
from instep.train.fused import can_fuse, has_sparse_gradients, may_choose, set_fused
from instep.train.named_state import FORMS, Names, by_name, by_number

NUM_SUMS = 7
"""Numbers that travel with the gradients: the loss times its weight, the weight, how many parts came with one, how many
there were, how many ranks were asked to stop, how many want to save, and in exact mode how many buffers the parts
changed."""

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer, int], Any]


class Parameters(list[nn.Parameter]):
    """The parameters to train; `named` has (name, parameter) pairs, to build groups from."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.named = [(name, p) for name, p in named if p.requires_grad]
        super().__init__(p for _, p in self.named)


class TrainState:
    """One prepared model. Its state is the parts `model`, `optimizer` and `scheduler` of a checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        strategy: Strategy,
        suffix: str,
        example: Example | None = None,
        recompute: bool = False,
        exact: bool = False,
    ) -> None:
        if any(map(is_lazy, model.parameters())):
            raise TaskError(
                "the model has lazy modules, whose shapes are unknown. Call it once on a sample in model()."
            )
        self.recomputed = recompute_blocks(model, strategy.context, strategy.blocks) if recompute else ""
        """The blocks that are computed twice, in words."""
        self.model = strategy.spread(model, example)
        parameters = Parameters(self.model.named_parameters())
        if not parameters:
            raise TaskError("the model has no parameter that requires a gradient, so there is nothing to train.")
        self.optimizer = make_optimizer(parameters)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TaskError(f"the optimizer is a {type(self.optimizer).__name__}; a torch.optim.Optimizer is needed.")
        sparse = any(getattr(module, "sparse", False) is True for module in self.model.modules())
        self.fused = can_fuse(self.optimizer) and not sparse if not exact and may_choose(self.optimizer) else None
        """Whether instep chose the optimizer's fused form; None: it is the user's choice."""
        self._has_reduced = False
        self._choose_form()
        strategy.settle(self.optimizer)
        self._strategy = strategy
        self._names = Names(self.model)
        self._is_partial = strategy.grid.mesh.pp > 1
        """Whether this rank has some of the names only."""
        self._restored_groups: list[dict[str, Any]] = []
        self.reducer = strategy.reducer(self._in_groups(), NUM_SUMS)
        self.shard_buffers: ShardBuffers | None = None
        """In exact mode, once the first step begins."""
        self.scheduler: Any = None
        self.updated = False
        """Whether this step has updated it already."""
        self._all = list(self.model.parameters())
        self.has_schedule = make_scheduler is not None
        self._make_scheduler = make_scheduler
        self._suffix = suffix

    def begin(self, num_steps: int, checkpoint: Checkpoint | None) -> None:
        """Make the schedule, now that its length is known, and bring it where the checkpoint left it."""
        self.scheduler = self._make_scheduler(self.optimizer, num_steps) if self._make_scheduler else None
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TaskError(
                "ReduceLROnPlateau wants a metric; schedules here count global steps. Use another scheduler."
            )
        if self.scheduler is not None and checkpoint is not None:
            self._load(checkpoint, "scheduler", lambda name: self.scheduler.load_state_dict(checkpoint.part(name)))
            # A scheduler's constructor sets the first learning rate; the optimizer's own is the one to go on with.
            for group, restored in zip(self.optimizer.param_groups, self._restored_groups, strict=True):
                group.update(restored)
            self._choose_form()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over the weights and the optimizer's state, or what this rank has of them."""

        def load_model(name: str) -> None:
            self.model.load_state_dict(reshard(checkpoint.stored(name), self.model.state_dict(), self._is_partial))

        self._load(checkpoint, "model", load_model)
        self._load(checkpoint, "optimizer", lambda name: self._load_optimizer(checkpoint, name))
        self._choose_form()

    def _choose_form(self) -> None:
        """Let the optimizer work in the form that was chosen; a checkpoint may hold another one."""
        if self.fused is not None:
            set_fused(self.optimizer, self.fused)

    def _load_optimizer(self, checkpoint: Checkpoint, part: str) -> None:
        names = self._names.of_groups(self.optimizer)
        model = checkpoint.stored("model" + self._suffix)

        def tied_to(name: str) -> list[str]:
            return [other for other in model if other != name and model[other] is model.get(name)]

        found = by_number(checkpoint.stored(part), names, self._is_partial, self._names.first, tied_to)
        parameters = dict(enumerate(self._in_groups()))
        groups = map_stored(found["param_groups"], StoredTensor.read)
        state = {
            key: map_stored(value, partial(read_for_parameter, parameter=parameters.get(key)))
            for key, value in found["state"].items()
        }
        for group, own in zip(groups, self.optimizer.param_groups, strict=True):
            group.update({key: own[key] for key in FORMS if key in own})
        self.optimizer.load_state_dict({**found, "state": state, "param_groups": groups})
        self._restored_groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def state(self) -> dict[str, Any]:
        """Give the parts of a checkpoint that are ours."""
        weights = self.model.state_dict()  # first: it brings a sharded model to rest
        parts = {"model": weights, "optimizer": by_name(self.optimizer, self._names.of_groups(self.optimizer))}
        if self.scheduler is not None:
            parts["scheduler"] = self.scheduler.state_dict()
        return {part + self._suffix: state for part, state in parts.items()}

    def begin_step(self) -> None:
        """Be ready for a step, with a group of parameters that was added since the last one, too."""
        if self._has_other_groups():
            self.reducer = self._strategy.reducer(self._in_groups(), NUM_SUMS)

    def reduce(self, sums: Sequence[float | torch.Tensor]) -> list[float]:
        """Agree with the other ranks on gradients; also on those of a group that was added in this step."""
        if self._has_other_groups():
            if self.shard_buffers is not None:
                raise TaskError(
                    "a group of parameters was added to the optimizer in the middle of a step. In exact mode, add it "
                    "after step.finish() or before the first step: the shards that are done know nothing of it."
                )
            self.begin_step()
        found = self.reducer.reduce(sums)
        if self.fused and not self._has_reduced and has_sparse_gradients(self.optimizer):
            self.fused = False
            self._choose_form()
        self._has_reduced = True
        return found

    def _has_other_groups(self) -> bool:
        return sum(len(group["params"]) for group in self.optimizer.param_groups) != len(self.reducer.parameters)

    def _in_groups(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def end_update(self, applied: bool) -> None:
        """Note that this step has updated it, or chose not to, and move the schedule on."""
        self.updated = True
        if self.scheduler is None:
            return
        with warnings.catch_warnings() if not applied else contextlib.nullcontext():
            if not applied:  # torch wonders where the update is; the schedule counts steps, made or skipped
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.scheduler.step()

    def clear_gradients(self) -> None:
        """Forget all gradients, also those of parameters that no optimizer has."""
        for p in self._all:
            p.grad = None
        self.reducer.forget()

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _load(self, checkpoint: Checkpoint, part: str, load: Callable[[str], object]) -> None:
        try:
            load(part + self._suffix)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{checkpoint.path}: its {part} does not fit the one that was built now: {error}\n"
                "Was the code changed since? Use another --run-dir, or --fresh to start over."
            ) from error
