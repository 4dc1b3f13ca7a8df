"""Pipeline parallelism as a strategy: cut the model, keep this rank's stages, make the reducer.

Ranks: all, in the same order.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from instep.core.balance import balance
from instep.core.errors import TaskError
from instep.core.microbatches import Schedule, bubble, scheduled, stages_a_rank, useful
from instep.core.spec import TrainSpec
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call, call_of
from instep.parallel.dropout import own_dropout
from instep.parallel.norm import sync_batch_norm
from instep.parallel.pipeline.chain import Chain, StageFunction, Uses, find_chain
from instep.parallel.pipeline.measure import Measured, estimate, measure
from instep.parallel.pipeline.ownership import keep_only, plan_holding
from instep.parallel.pipeline.pipe import Pipe, stage_model
from instep.parallel.pipeline.reducer import PipelineReducer, Shared
from instep.parallel.pipeline.schedule import Microbatch
from instep.parallel.strategy import NO_HINTS, LossOf, ModelHints, Reducer, StepPart, Strategy
from instep.world.grid import Grid


@dataclass(frozen=True)
class StagePlan:
    """Where a chain is cut."""

    bounds: tuple[int, ...]
    """Layers: stage s has those from bounds[s] to bounds[s + 1] - 1."""
    costs: tuple[float, ...]
    """Of each stage."""


class Pipeline(Strategy):
    """Stages of the model on different ranks, which batches pass through in microbatches."""

    name = "pipeline"
    is_partial = True
    has_all_names = False
    calls_model = False
    axes = ("pp",)

    @classmethod
    def of(cls, spec: TrainSpec, grid: Grid, context: BatchContext) -> Strategy:
        spec.check_pipeline(grid.mesh)
        return cls(grid, context, spec.schedule, spec.microbatches)

    def __init__(self, grid: Grid, context: BatchContext, schedule: Schedule, microbatches: int | None) -> None:
        super().__init__(grid, context)
        assert grid.devices is not None
        self._schedule: Schedule = schedule
        self._asked = microbatches
        self._group = grid.devices["pp"].get_group()
        self._pipe_world = grid.world.within(self._group)
        self._pipes: dict[nn.Module, Pipe] = {}
        self._shared: list[Shared] = []
        self._layouts: list[str] = []
        self._num_parameters: dict[nn.Module, int] = {}
        """Of the whole model."""
        self._has_batch_norm = False
        self._predicted = 0.0

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.grid.mesh.pp * stages_a_rank(self._schedule)

    def spread(self, model: nn.Module, hints: ModelHints = NO_HINTS) -> nn.Module:
        model = own_dropout(model, self.context)
        self._has_batch_norm |= sync_batch_norm(model, self.grid.data, self.context) > 0
        call = hints.example() if hints.example is not None else None
        self._num_parameters[model] = sum(p.numel() for p in model.parameters())
        chain = find_chain(model, hints.layers, call, self.num_stages)
        measured = self._measure(model, chain, call)
        plan = plan_stages(chain, measured, model, self.num_stages)
        functions = self._keep_own(model, chain, plan)
        before = {
            stage: measured.noise_uses[plan.bounds[stage] - 1]
            for stage in functions
            if stage and len(measured.noise_uses) >= plan.bounds[stage]
        }
        pipe = Pipe(
            model, functions, self.num_stages, self._schedule, self.grid.world, self._group, self.context, before
        )
        stage_model(model, pipe)
        self._pipes[model] = pipe
        self._layouts.append(_describe(chain, plan))
        return model

    def run_part(self, part: StepPart, model: nn.Module, loss_of: LossOf) -> None:
        """Run a part through the stages, in micro-batches; the loss is computed on the last stage."""
        pipe = self._pipes.get(model)
        if pipe is None:  # not a model of run.prepare(); calling it says what is wrong
            return part.run_whole(model, loss_of)
        rows = part.rows
        own = rows.num_rows if rows.replicated else rows.micro_rows // self.grid.mesh.data_size
        microbatches = []
        for first, num_rows, batch in part.cut(self.num_microbatches(own)):
            # A loss may draw noise before it calls the model, and draws it again where it is computed: the same.
            part.seed_noise(rows.first_row + first)
            microbatches.append(Microbatch(rows.first_row + first, num_rows, batch, call_of(loss_of, batch)))

        def compute_loss(replay: Callable[..., Any], microbatch: Microbatch) -> torch.Tensor | None:
            part.seed_noise(microbatch.first_row)
            stand_in: Any = replay
            return part.scaled_loss(loss_of(stand_in, microbatch.batch), microbatch.num_rows)

        part.begin_gradient()
        return pipe.train(microbatches, rows.replicated, compute_loss)

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return PipelineReducer(parameters, self.grid, self._pipe_world, self._shared)

    def num_parameters(self, model: nn.Module) -> int:
        return self._num_parameters[model]

    def num_microbatches(self, rows: int) -> int:
        """Into how many microbatches `rows` rows of each copy of the pipeline are cut."""
        return useful(self._asked, rows, self.grid.mesh.pp)

    def smallest_part(self, rows: int) -> int:
        own = max(1, rows // self.grid.mesh.data_size)
        return rows // self.num_microbatches(own)

    def notices(self, rows: int) -> list[str]:
        count = self.num_microbatches(rows)
        ranks = self.grid.mesh.pp
        self._predicted = bubble(self._schedule, ranks, scheduled(self._schedule, count, ranks))
        found = [
            f"pipeline of {self.num_stages} stages on {ranks} ranks: {layout}. With {self._schedule} and {count} "
            f"microbatches of a batch, a rank will stand idle for {self._predicted:.0%} of the time, if its stages are "
            "as fast as the others'"
            for layout in self._layouts
        ]
        if self._has_batch_norm and count > 1:
            found.append(
                f"BatchNorm's statistics cover one microbatch, so microbatches={count} is another recipe than one "
                f"process without --accumulate: on one rank for each stage, that of --accumulate {count}"
            )
        return found

    def report(self) -> list[str]:
        clock = next(iter(self._pipes.values())).clock
        if self.grid.world.device.type != "cpu" or not clock.total_s:
            return []
        told = self.grid.world.all_gather_object(clock.idle_share)
        shares = ", ".join(f"{share:.0%}" for share in told)
        mean = f"{sum(told) / len(told):.0%}"
        return [
            f"the ranks of the pipeline stood idle for {mean} of the time ({shares}); predicted {self._predicted:.0%}"
        ]

    def _measure(self, model: nn.Module, chain: Chain, call: Call | None) -> Measured:
        """Find out on rank 0 what the layers cost: all ranks must cut alike. Called on all ranks."""
        if call is None:
            return estimate(model, chain)
        found: dict[str, object] | None = None
        if self.grid.world.is_main:
            try:
                found = measure(model, chain, call, self.context).to_json()
            except TaskError as error:
                found = {"error": str(error)}
        told = self.grid.world.broadcast_object(found)
        if "error" in told:
            raise TaskError(told["error"])
        return Measured(**told)

    def _keep_own(self, model: nn.Module, chain: Chain, plan: StagePlan) -> dict[int, StageFunction]:
        """Let go of all but this rank's stages; give what computes them. Called on all ranks."""
        ranks, own = self.grid.mesh.pp, self._pipe_world.rank
        by_stage = [_together(chain, plan.bounds[stage], plan.bounds[stage + 1]) for stage in range(self.num_stages)]
        by_rank = [_union(by_stage[rank::ranks]) for rank in range(ranks)]
        holding = plan_holding(model, by_rank)
        named = dict(model.named_parameters())
        keep_only(model, holding.by_rank[own])
        gc.collect()  # tracing leaves cycles that hold on to the rest
        model.to(self.grid.world.device)
        functions = {
            stage: chain.stage(plan.bounds[stage], plan.bounds[stage + 1])
            for stage in range(own, self.num_stages, ranks)
        }
        # The seed gives every rank the same weights; what a model drew from elsewhere is settled here.
        self.grid.data.broadcast([*model.parameters(), *model.buffers()])
        for holders in sorted({ranks for _, ranks in holding.shared}):
            world = self._pipe_world if len(holders) == self.grid.mesh.pp else self.grid.among(holders)
            if world is not None:
                parameters = tuple(named[name] for name, ranks in holding.shared if ranks == holders)
                world.broadcast(parameters)
                self._shared.append(Shared(parameters, world))
        return functions


def plan_stages(chain: Chain, measured: Measured, model: nn.Module, num_stages: int) -> StagePlan:
    """Decide where to cut: stages of about the same cost, each with something to train."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    has_weights = [bool(chain.uses(number).tensors & trained) for number in range(len(chain.names))]
    ends = _possible_ends(has_weights, measured.passable)
    if len(ends) < num_stages:
        raise TaskError(
            f"a {type(model).__name__} has {len(ends)} {'layers' if len(ends) != 1 else 'layer'} with weights that can "
            f"be apart, and a pipeline of {num_stages} stages needs {num_stages}. Use fewer processes along pp (and "
            "not schedule=interleaved, which has two stages on each), or name more layers by layers(model) in the Task."
        )
    starts = [0, *ends[:-1]]
    costs = [sum(measured.costs[first:last]) for first, last in zip(starts, ends, strict=True)]
    cuts = balance(costs, num_stages)
    bounds = tuple([0, *ends][cut] for cut in cuts)
    return StagePlan(bounds, tuple(sum(measured.costs[a:b]) for a, b in itertools.pairwise(bounds)))


def _possible_ends(has_weights: Sequence[bool], passable: Sequence[bool]) -> list[int]:
    """Find after which layers a stage may end: it has weights, the next layer has, and what it gives can travel.

    So a layer without weights stays with the one before: an activation that works in place may not begin a stage.
    """
    ends: list[int] = []
    has_own = False
    for number, has in enumerate(has_weights):
        has_own |= has
        if number == len(has_weights) - 1:
            break
        if has_own and passable[number] and has_weights[number + 1]:
            ends.append(number + 1)
            has_own = False
    return [*ends, len(has_weights)] if has_own or ends else []


def _together(chain: Chain, first: int, last: int) -> Uses:
    return _union([chain.uses(number) for number in range(first, last)])


def _union(parts: Sequence[Uses]) -> Uses:
    found = Uses()
    for part in parts:
        found |= part
    return found


def _describe(chain: Chain, plan: StagePlan) -> str:
    whole = sum(plan.costs) or 1.0
    found = []
    for stage, cost in enumerate(plan.costs):
        names = chain.names[plan.bounds[stage] : plan.bounds[stage + 1]]
        span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        found.append(f"{span} ({cost / whole:.0%})")
    return ", ".join(found)
