"""One model with its optimizer and scheduler: live and checkpointed."""

import copy
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.manifest import EMA, FROZEN, MODEL
from instep.checkpoint.reader import StoredTensor, map_stored
from instep.checkpoint.shards import read_for_parameter, reshard
from instep.checkpoint.state_tree import find_other_type
from instep.core.errors import CheckpointError, TaskError
from instep.parallel.blocks import blocks_of, count_by_class
from instep.parallel.memory_format import use_channels_last
from instep.parallel.recompute import recompute_blocks
from instep.parallel.shard_buffers import ShardBuffers
from instep.parallel.strategy import NO_HINTS, ModelHints, Reducer, StepSums, Strategy
from instep.train.average import WeightAverage
from instep.train.checkpoint_part import CheckpointPart
from instep.train.fork import Fork, MakeOptimizer, build, rebase
from instep.train.frozen_weights import FrozenSpec, FrozenWeights, names_left_out
from instep.train.lr_schedule import LrSchedule, MakeScheduler
from instep.train.optimizer import FORMS, Names, by_name, by_number, can_fuse, check_optimizer, check_shapes, set_fused


class Parameters(list[nn.Parameter]):
    """The parameters to train; `named` has (name, parameter) pairs, to build groups from."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.named = [(name, p) for name, p in named if p.requires_grad]
        super().__init__(p for _, p in self.named)


class TrainState:
    """One prepared model: the parts `model`, `optimizer` and `scheduler` of a checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        strategy: Strategy,
        suffix: str,
        hints: ModelHints = NO_HINTS,
        recompute: bool = False,
        exact: bool = False,
        channels_last: bool = False,
        ema: float | None = None,
        frozen: FrozenSpec | None = None,
        fork: Fork | None = None,
    ) -> None:
        if any(map(is_lazy, model.parameters())):
            raise TaskError(
                "the model has lazy modules, whose shapes are unknown. Call it once on a sample in model()."
            )
        _check_modules(model, exact or strategy.grid.world.world_size > 1)
        self.recomputed = recompute_blocks(model, strategy.context, hints.blocks) if recompute else ""
        """The blocks that are computed twice, in words."""
        self.compiled = ""
        """What regional compilation compiles, in words."""
        self._blocks = [block for _, block in blocks_of(model, hints.blocks)] if strategy.compiles_blocks else []
        self._block_names = count_by_class(self._blocks)
        self.model = spread_model(model, strategy, hints, channels_last)
        parameters = Parameters(self.model.named_parameters())
        if not parameters:
            raise TaskError("the model has no parameter that requires a gradient, so there is nothing to train.")
        self.optimizer = make_optimizer(parameters)
        self._makers, self._fork = Fork(make_optimizer, make_scheduler), fork
        self._num_steps: int | None = None
        check_optimizer(self.optimizer)
        self.fused = None if exact else can_fuse(self.optimizer)
        """Whether instep chose the optimizer's fused form; None: it is the user's choice."""
        if self.fused and any(getattr(module, "sparse", False) is True for module in self.model.modules()):
            self.fused = False
        self._parameters, self._has_reduced = parameters, False
        self._choose_form()
        strategy.adapt_optimizer(self.optimizer)
        self.strategy = strategy
        self.average = None if ema is None else WeightAverage(self.model, strategy, ema)
        self._frozen_weights = FrozenWeights(self.model, strategy, frozen) if frozen is not None else None
        self._names = Names(self.model)
        self._restored_groups: list[dict[str, Any]] = []
        self._frozen: frozenset[nn.Parameter] = frozenset()
        self._num_in_groups = 0
        """Of parameters, when the reducer was made."""
        self.reducer = self._make_reducer()
        self.shard_buffers: ShardBuffers | None = None
        """In exact mode, once the first step begins."""
        self.schedule: LrSchedule | None = None
        self.updated = False
        """Whether this step has updated it already."""
        self._all = list(self.model.parameters())
        self.has_schedule = make_scheduler is not None
        self._suffix = suffix

    def compile_blocks(self) -> None:
        """Compile the model as its strategy does ([Note: Regional compilation])."""
        is_by_block = self.strategy.compile_blocks(self.model, self._blocks)
        self.compiled = self._block_names if is_by_block else "as a whole"

    def begin(self, num_steps: int) -> CheckpointPart | None:
        """Make the scheduler, now that its length is known; return its checkpoint part, if there is one."""
        make = self._makers.make_scheduler
        self._num_steps = num_steps
        self.schedule = None if make is None else LrSchedule.of(make(self.optimizer, num_steps))
        if self.schedule is None:
            return None
        scheduler = self.schedule.scheduler
        return self._part("scheduler", scheduler.state_dict, self._load_scheduler, on_all_ranks=False)

    def parts(self) -> list[CheckpointPart]:
        """Return the checkpoint parts of the model and the optimizer, in the order in which they are saved."""
        # The model first: its state_dict brings a sharded model to rest.
        parts = [
            self._part("model", self._model_state, self._load_model),
            self._part("optimizer", lambda: by_name(self.optimizer, self._own_names()), self._load_optimizer),
        ]
        if (average := self.average) is not None:
            parts.append(
                self._part(EMA, average.state, lambda checkpoint, part: average.restore(checkpoint.stored(part)))
            )
        if self._frozen_weights is not None and (record := self._frozen_weights.record())["names"]:
            parts.append(CheckpointPart(FROZEN + self._suffix, lambda: record))  # `_load_model` reads it
        return parts

    def _model_state(self) -> dict[str, Any]:
        state = self.model.state_dict()
        return state if self._frozen_weights is None else self._frozen_weights.without(state, self.optimizer)

    def _part(
        self, kind: str, save: Callable[[], Any], load: Callable[[Checkpoint, str], None], on_all_ranks: bool = True
    ) -> CheckpointPart:
        name = kind + self._suffix

        def restore(checkpoint: Checkpoint) -> None:
            try:
                load(checkpoint, name)
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"it does not fit the {kind} that was built now: {error}") from error

        return CheckpointPart(name, save, restore, on_all_ranks)

    def _load_scheduler(self, checkpoint: Checkpoint, part: str) -> None:
        assert self.schedule is not None
        scheduler, state = self.schedule.scheduler, checkpoint.part(part)
        fresh = scheduler.state_dict()
        _check_types(scheduler, state, fresh)
        if lost := [key for key in ("last_epoch", "base_lrs", "_step_count") if key in fresh and key not in state]:
            raise ValueError(f"it has no {lost[0]!r}")
        scheduler.load_state_dict(self._rebased("schedule", state))
        # A scheduler's constructor sets the first learning rate; the optimizer's own is the one to continue with.
        self._set_groups(self._restored_groups)

    def _set_groups(self, restored: list[dict[str, Any]]) -> None:
        """Set the settings of the optimizer to those of a checkpoint."""
        for group, settings in zip(self.optimizer.param_groups, self._rebased("groups", restored), strict=True):
            group.update(settings)
        self._choose_form()

    def _rebased(self, kind: Literal["groups", "schedule"], saved: Any) -> Any:
        """Return saved settings as they hold here; other than saved in a forked run ([Note: Forked runs])."""
        if self._fork is None:
            return saved
        built = (build(makers, self._parameters, self._num_steps) for makers in (self._fork, self._makers))
        return rebase(saved, *(getattr(one, kind) for one in built))

    def _load_model(self, checkpoint: Checkpoint, _part: str) -> None:
        load_saved(self.model, self.strategy, checkpoint, self._suffix, self._frozen_weights)

    def _choose_form(self) -> None:
        """Set the form of the optimizer that was chosen; a checkpoint may hold another one."""
        if self.fused is not None:
            set_fused(self.optimizer, self.fused)

    def _load_optimizer(self, checkpoint: Checkpoint, part: str) -> None:
        model = checkpoint.stored("model" + self._suffix)

        def tied_to(name: str) -> list[str]:
            return [other for other in model if other != name and model[other] is model.get(name)]

        is_partial = not self.strategy.has_all_names
        saved = by_number(checkpoint.stored(part), self._own_names(), is_partial, self._names.first, tied_to)
        parameters = dict(enumerate(self._in_groups()))
        groups = map_stored(saved["param_groups"], StoredTensor.read)
        state = {
            key: map_stored(value, partial(read_for_parameter, parameter=parameters.get(key)))
            for key, value in saved["state"].items()
        }
        own_groups = self.optimizer.param_groups
        for group, own in zip(groups, own_groups, strict=True):
            group.update({key: own[key] for key in FORMS if key in own})
            _check_types(self.optimizer, group, {key: value for key, value in own.items() if key != "params"})
        keys = [set(own) for own in own_groups]
        check_shapes(self.optimizer, {parameters[key]: values for key, values in state.items() if key in parameters})
        self.optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})
        for group, before in zip(self.optimizer.param_groups, keys, strict=True):
            if lost := sorted(before - set(group)):
                raise ValueError(f"a group of parameters has no {lost[0]!r}")
        self._restored_groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        self._set_groups(self._restored_groups)

    def _own_names(self) -> list[list[str]]:
        return self._names.of_groups(self.optimizer)

    def begin_step(self) -> None:
        """Make a new reducer if a group of parameters was added since the last step."""
        if self._has_other_groups():
            self.reducer.close()
            self.reducer = self._make_reducer()

    def freeze(self, frozen: Collection[nn.Parameter]) -> None:
        """Train all parameters but these from now on ([Note: Freezing]); between two steps. Called on all ranks."""
        before, self._frozen = self._frozen, frozenset(frozen)
        self.strategy.set_trainable(self.model, {p: p not in self._frozen for p in before ^ self._frozen})
        self.reducer.close()
        self.reducer = self._make_reducer()

    def _make_reducer(self) -> Reducer:
        parameters = self._in_groups()
        self._num_in_groups = len(parameters)
        return self.strategy.reducer([p for p in parameters if p not in self._frozen])

    def reduce(self, sums: StepSums) -> StepSums:
        """Agree with the other ranks on gradients, also of a group that was added in this step; return the sums."""
        if self._has_other_groups():
            if self.shard_buffers is not None:
                raise TaskError(
                    "a group of parameters was added to the optimizer in the middle of a step. In exact mode, add it "
                    "after step.finish() or before the first step: the shards that are done know nothing of it."
                )
            self.begin_step()
        totals = self.reducer.reduce(sums)
        if self.fused and not self._has_reduced:
            self.fused = not any(p.grad is not None and p.grad.is_sparse for p in self._in_groups())
            self._choose_form()
        self._has_reduced = True
        return totals

    def _has_other_groups(self) -> bool:
        num_in_groups = 0
        for group in self.optimizer.param_groups:
            num_in_groups += len(group["params"])
        return num_in_groups != self._num_in_groups

    def _in_groups(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def end_update(self, applied: bool, ends_epoch: bool) -> None:
        """Note that this step has updated the model, or chose not to, and step the schedule."""
        self.updated = True
        if self.average is not None and applied:
            self.average.update()
        if self.schedule is not None:
            self.schedule.end_update(applied, ends_epoch)

    def clear_gradients(self) -> None:
        """Drop all gradients, also those of parameters that no optimizer has."""
        for p in self._all:
            p.grad = None
        self.reducer.forget()


def _check_modules(model: nn.Module, is_split: bool) -> None:
    """Raise TaskError for what cannot be saved, or would not give the same answer on several ranks, or shards."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_complex():
            raise TaskError(
                f"{name} is of {tensor.dtype}, which a checkpoint cannot hold. Keep its real and imaginary parts in "
                "one real tensor (torch.view_as_real), and use torch.view_as_complex in forward."
            )
    for name, module in model.named_modules():
        where = f"the model's {name}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TaskError(
                f"{where} is a TorchScript module, in which dropout and BatchNorm cannot be replaced by those of the "
                "global batch. Give the Python module; --compile makes it fast."
            )
        if is_split and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise TaskError(
                f"{where} is an {type(module).__name__} with max_norm={module.max_norm}, which rescales those of its "
                "rows that a batch asks for: other ones on each rank. Rescale its output instead, or all of its weight "
                "between two steps."
            )


def _check_types(owner: Any, saved: Any, fresh: Any) -> None:
    """Raise ValueError if a state of torch's own classes, whose values keep their types, has another type."""
    if type(owner).__module__.startswith("torch.optim") and (text := find_other_type(saved, fresh)):
        raise ValueError(text)


def spread_model(model: nn.Module, strategy: Strategy, hints: ModelHints, channels_last: bool) -> nn.Module:
    """Distribute a model, and choose the memory format of its convolutions. Called on all ranks."""
    model = strategy.spread(model, hints)
    if channels_last and strategy.allows_channels_last:
        use_channels_last(model)
    return model


def load_saved(
    model: nn.Module, strategy: Strategy, checkpoint: Checkpoint, suffix: str, frozen: FrozenWeights | None
) -> None:
    """Load what this rank holds of a model from a checkpoint; `frozen`: what the checkpoint may leave out."""
    own, stored = model.state_dict(), checkpoint.stored(MODEL + suffix)
    saved = reshard(stored, own, not strategy.has_all_names)
    if frozen is not None:
        left_out = names_left_out(checkpoint, FROZEN + suffix, frozen.sha256)
        saved |= {name: own[name] for name in left_out if name in own and name not in stored}
        frozen.keep(stored)
    for name, tensor in own.items():
        if isinstance(tensor, torch.Tensor) and name in saved and saved[name].dtype != tensor.dtype:
            raise ValueError(f"{name} is of {saved[name].dtype}, and the model's of {tensor.dtype}")
    model.load_state_dict(saved)
