"""The strategy `pipeline`: split the model, keep this rank's stages, reduce gradients.

Ranks: all, in the same order.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from instep.core.errors import TaskError
from instep.core.microbatches import Schedule, bubble, scheduled, stages_a_rank, useful
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call
from instep.parallel.ddp import DdpReducer, DistributedReducer
from instep.parallel.dropout import replace_dropout
from instep.parallel.norm import sync_batch_norm
from instep.parallel.pipeline.layers import LayerSequence, StageFunction, find_layers
from instep.parallel.pipeline.ownership import Uses, keep_only, plan_ownership
from instep.parallel.pipeline.profile import LayerProfile, StagePlan, estimate_profile, plan_stages, profile_layers
from instep.parallel.pipeline.stages import LocalStages, stage_model
from instep.parallel.single import LocalReducer
from instep.parallel.strategy import Example, Reducer, Strategy
from instep.world.grid import Grid
from instep.world.world import World


class Pipeline(Strategy):
    """Stages of the model on different ranks, through which microbatches pass."""

    name = "pipeline"

    def __init__(self, grid: Grid, context: BatchContext, schedule: Schedule, microbatches: int | None) -> None:
        super().__init__(grid, context)
        assert grid.devices is not None
        self._schedule: Schedule = schedule
        self._asked = microbatches
        self._group = grid.devices["pp"].get_group()
        self._pp_world = grid.world.within(self._group)
        self._local_stages: list[LocalStages] = []
        self._shared: list[SharedParameters] = []
        self._layouts: list[str] = []
        self._num_parameters: dict[nn.Module, int] = {}
        """Of the whole model."""
        self._has_batch_norm = False
        self._predicted = 0.0

    @property
    def num_stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return self.grid.mesh.pp * stages_a_rank(self._schedule)

    def spread(self, model: nn.Module, example: Example | None = None) -> nn.Module:
        model = replace_dropout(model, self.context)
        self._has_batch_norm |= sync_batch_norm(model, self.grid.data, self.context) > 0
        call = example() if example is not None else None
        self._num_parameters[model] = sum(p.numel() for p in model.parameters())
        layers = find_layers(model, self.layers, call, self.num_stages)
        profile = self._profile(model, layers, call)
        plan = plan_stages(layers, profile, model, self.num_stages)
        functions = self._keep_local(model, layers, plan)
        noise_uses = {
            stage: profile.noise_uses[plan.bounds[stage] - 1]
            for stage in functions
            if stage and len(profile.noise_uses) >= plan.bounds[stage]
        }
        local_stages = LocalStages(
            model, functions, self.num_stages, self._schedule, self.grid.world, self._group, self.context, noise_uses
        )
        stage_model(model, local_stages)
        self._local_stages.append(local_stages)
        self._layouts.append(plan.describe(layers.names))
        return model

    def reducer(self, parameters: Sequence[nn.Parameter], num_sums: int) -> Reducer:
        return PipelineReducer(parameters, self.grid, self._pp_world, self._shared, num_sums)

    def num_parameters(self, model: nn.Module) -> int:
        return self._num_parameters[model]

    def num_microbatches(self, rows: int) -> int:
        """Return into how many microbatches `rows` rows of each replica of the pipeline are split."""
        return useful(self._asked, rows, self.grid.mesh.pp)

    def smallest_part(self, rows: int) -> int:
        local_rows = max(1, rows // self.grid.mesh.data_size)
        return rows // self.num_microbatches(local_rows)

    def notices(self, rows: int) -> list[str]:
        count = self.num_microbatches(rows)
        ranks = self.grid.mesh.pp
        self._predicted = bubble(self._schedule, ranks, scheduled(self._schedule, count, ranks))
        notices = [
            f"pipeline of {self.num_stages} stages on {ranks} ranks: {layout}. With {self._schedule} and {count} "
            f"microbatches of a batch, a rank will be idle for {self._predicted:.0%} of the time, if its stages are as "
            "fast as the others'"
            for layout in self._layouts
        ]
        if self._has_batch_norm and count > 1:
            notices.append(
                f"BatchNorm's statistics cover one microbatch, so microbatches={count} is another recipe than one "
                f"process without --accumulate: on one rank for each stage, that of --accumulate {count}"
            )
        return notices

    def report(self) -> list[str]:
        clock = self._local_stages[0].clock
        if self.grid.world.device.type != "cpu" or not clock.total_s:
            return []
        shares = self.grid.world.all_gather_object(clock.idle_share)
        mean, by_rank = f"{sum(shares) / len(shares):.0%}", ", ".join(f"{share:.0%}" for share in shares)
        return [
            f"the ranks of the pipeline were idle for {mean} of the time ({by_rank}); predicted {self._predicted:.0%}"
        ]

    def _profile(self, model: nn.Module, layers: LayerSequence, call: Call | None) -> LayerProfile:
        """Return rank 0's profile of the layers: all ranks must split alike. Called on all ranks."""
        if call is None:
            return estimate_profile(model, layers)
        fields: dict[str, object] | None = None
        if self.grid.world.is_main:
            try:
                fields = asdict(profile_layers(model, layers, call, self.context))
            except TaskError as error:
                fields = {"error": str(error)}
        received = self.grid.world.broadcast_object(fields)
        if "error" in received:
            raise TaskError(received["error"])
        return LayerProfile(**received)

    def _keep_local(self, model: nn.Module, layers: LayerSequence, plan: StagePlan) -> dict[int, StageFunction]:
        """Remove all but this rank's stages; return the functions that compute these. Called on all ranks."""
        num_ranks, pp_rank = self.grid.mesh.pp, self._pp_world.rank
        runs = list(itertools.pairwise(plan.bounds))
        by_stage = [Uses.union(map(layers.uses, range(first, last))) for first, last in runs]
        ownership = plan_ownership(model, [Uses.union(by_stage[rank::num_ranks]) for rank in range(num_ranks)])
        named = dict(model.named_parameters())
        keep_only(model, ownership.by_rank[pp_rank])
        gc.collect()  # tracing leaves reference cycles that keep the rest alive
        model.to(self.grid.world.device)
        functions = {stage: layers.stage(*runs[stage]) for stage in range(pp_rank, self.num_stages, num_ranks)}
        # The seed gives every rank the same weights; the broadcast is for what a model drew from elsewhere.
        self.grid.data.broadcast([*model.parameters(), *model.buffers()])
        for owners in sorted({ranks for _, ranks in ownership.shared}):
            world = self._pp_world if len(owners) == num_ranks else self.grid.among(owners)
            if world is not None:
                parameters = tuple(named[name] for name, ranks in ownership.shared if ranks == owners)
                world.broadcast(parameters)
                self._shared.append(SharedParameters(parameters, world))
        return functions


@dataclass(frozen=True)
class SharedParameters:
    """Parameters that this rank and the same other ranks of its pipeline own."""

    parameters: tuple[nn.Parameter, ...]
    world: World
    """The ranks that own them."""

    def all_reduce(self, ids: set[int]) -> None:
        """All-reduce the gradients of those parameters whose ids are given. Called on all ranks that own them."""
        chosen = [p for p in self.parameters if id(p) in ids]
        if not chosen:
            return
        counts = torch.tensor([float(p.grad is not None) for p in chosen], device=chosen[0].device)
        is_used = self.world.all_reduce(counts).tolist()
        for p, used in zip(chosen, is_used, strict=True):
            if not used:
                continue
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            grad = grad.to_dense() if grad.is_sparse else grad.contiguous()
            p.grad = self.world.all_reduce(grad.detach())


class PipelineReducer(DistributedReducer):
    """Reduces gradients over the replicas of a stage; those of shared weights also over the stages that own them.

    The step's own sums (loss, weight, flags) are reduced over the replicas with the gradients, and then once along the
    pipeline, so that all ranks have them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        grid: Grid,
        pp_world: World,
        shared: Sequence[SharedParameters],
        num_sums: int,
    ) -> None:
        super().__init__(parameters, grid, {p: group.world.world_size for group in shared for p in group.parameters})
        self._pp_world = pp_world
        self._shared = shared
        self._replicas = (
            DdpReducer(parameters, grid.data, num_sums) if grid.data.world_size > 1 else LocalReducer(parameters)
        )
        self._ids = {id(p) for p in self.parameters}

    def reduce(self, sums: Sequence[float | torch.Tensor]) -> list[float]:
        totals = self._replicas.reduce(sums)
        for shared in self._shared:
            shared.all_reduce(self._ids)
        row = torch.tensor(totals, dtype=torch.float64, device=self._pp_world.device)
        return self._pp_world.all_reduce(row).tolist()

    def forget(self) -> None:
        self._replicas.forget()
