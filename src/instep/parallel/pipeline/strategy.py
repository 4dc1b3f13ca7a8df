"""The strategy `pipeline`: split the model, keep this rank's stages, reduce gradients.

Ranks: all, in the same order.
"""

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from instep.core.errors import TaskError
from instep.core.microbatches import Schedule, bubble, scheduled, stages_a_rank, useful
from instep.core.spec import TrainSpec
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call, call_of
from instep.parallel.class_change import add_base
from instep.parallel.ddp import DdpReducer
from instep.parallel.dropout import replace_dropout
from instep.parallel.gradients import clip_gradients
from instep.parallel.norm import sync_batch_norm
from instep.parallel.pipeline.layers import LayerSequence, StageFunction, find_layers
from instep.parallel.pipeline.ownership import Uses, keep_only, plan_ownership
from instep.parallel.pipeline.profile import LayerProfile, StagePlan, estimate_profile, plan_stages, profile_layers
from instep.parallel.pipeline.schedule import Microbatch
from instep.parallel.pipeline.stages import LocalStages, Staged
from instep.parallel.regional import Region, RegionalLoss, compile_blocks, hold_keys
from instep.parallel.single import LocalReducer
from instep.parallel.strategy import LossOf, ModelHints, Reducer, StepPart, StepSums, Strategy
from instep.world.grid import Grid
from instep.world.world import World

SharedParameters = tuple[list[nn.Parameter], World]
"""Parameters that this rank and the same other ranks of its pipeline own, and these ranks."""


class Pipeline(Strategy):
    """Stages of the model on different ranks, through which microbatches pass."""

    name = "pipeline"
    is_partial = True
    compiles_blocks = True
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
        self._pp_world = grid.world.within(self._group)
        self._local_stages: dict[nn.Module, LocalStages] = {}
        self._calls: dict[nn.Module, Callable[[nn.Module], bool]] = {}
        """Whether the stages of a model call a module of it."""
        self._shared: list[SharedParameters] = []
        self._layouts: list[str] = []
        self._num_parameters: dict[nn.Module, int] = {}
        """Of the whole model."""
        self._compiled_losses: dict[LossOf, LossOf] = {}
        self._has_batch_norm = False
        self._predicted = 0.0

    @property
    def num_stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return self.grid.mesh.pp * stages_a_rank(self._schedule)

    def spread(self, model: nn.Module, hints: ModelHints) -> nn.Module:
        model = replace_dropout(model, self.context)
        self._has_batch_norm |= sync_batch_norm(model, self.grid.data, self.context) > 0
        call = hints.example() if hints.example is not None else None
        self._num_parameters[model] = sum(p.numel() for p in model.parameters())
        layers = find_layers(model, hints.layers, call, self.num_stages)
        profile = self._profile(model, layers, call)
        plan = plan_stages(layers, profile, model, self.num_stages)
        functions = self._keep_local(model, layers, plan)
        noise_uses = {s: profile.noise_uses[plan.bounds[s] - 1] for s in functions if s and profile.noise_uses}
        self._local_stages[model] = LocalStages(
            model, functions, self.num_stages, self._schedule, self.grid.world, self._group, self.context, noise_uses
        )
        add_base(model, Staged, local_stages=self._local_stages[model])
        self._layouts.append(plan.describe(layers.names))
        self._calls[model] = layers.calls
        return model

    def compile_blocks(self, model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
        """Compile the blocks of this rank's stages; the stages as a whole if they call no blocks."""
        self.context.keeps_noise = True  # microbatches go forward before others go back
        if called := [block for block in blocks if self._calls[model](block)]:
            local = set(model.modules())
            compile_blocks([block for block in called if block in local], self.context)
            return True
        functions = self._local_stages[model].functions
        functions |= {stage: Region(function, self.context) for stage, function in functions.items()}
        hold_keys(model)
        return False

    def compile_loss(self, loss_of: LossOf) -> LossOf:
        self._compiled_losses[loss_of] = RegionalLoss(loss_of, self.context)
        return loss_of  # with which `run_part` captures the model's calls, uncompiled

    def run_part(self, part: StepPart, model: nn.Module, loss_of: LossOf) -> None:
        """Run a part through the stages, in microbatches; the loss is computed on the last stage."""
        local_stages = self._local_stages.get(model)
        if local_stages is None:  # not a model of run.prepare(); calling it says what is wrong
            part.run_whole(model, loss_of)
            return
        rows = part.rows
        local_rows = rows.num_rows if rows.replicated else rows.micro_rows // self.grid.mesh.data_size
        microbatches = []
        for first, num_rows, batch in part.cut(self.num_microbatches(local_rows)):
            # A loss may draw noise before it calls the model, and draws it again where it is computed: the same.
            part.seed_noise(rows.first_row + first)
            microbatches.append(Microbatch(rows.first_row + first, num_rows, batch, call_of(loss_of, batch)))

        compiled_loss = self._compiled_losses.get(loss_of, loss_of)

        def compute_loss(replay: Callable[..., Any], microbatch: Microbatch) -> torch.Tensor | None:
            part.seed_noise(microbatch.first_row)
            stand_in: Any = replay
            return part.scaled_loss(compiled_loss(stand_in, microbatch.batch), microbatch.num_rows)

        part.begin_gradient()
        backward_s = local_stages.clock.backward_s
        local_stages.train(microbatches, rows.replicated, compute_loss)
        part.count_backward(local_stages.clock.backward_s - backward_s)

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return PipelineReducer(parameters, self.grid, self._pp_world, self._shared)

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
        clock = next(iter(self._local_stages.values())).clock
        if self.grid.world.device.type != "cpu" or not clock.total_s:
            return []
        shares = self.grid.world.all_gather_object(clock.idle_s / clock.total_s)
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
        owned, shared = plan_ownership(model, [Uses.union(by_stage[rank::num_ranks]) for rank in range(num_ranks)])
        named = dict(model.named_parameters())
        keep_only(model, owned[pp_rank])
        gc.collect()  # tracing leaves reference cycles that keep the rest alive
        model.to(self.grid.world.device)
        functions = {stage: layers.stage(*runs[stage]) for stage in range(pp_rank, self.num_stages, num_ranks)}
        # The seed gives every rank the same weights; the broadcast is for what a model drew from elsewhere.
        self.grid.data.broadcast([*model.parameters(), *model.buffers()])
        for owners, names in sorted(shared.items()):
            world = self._pp_world if len(owners) == num_ranks else self.grid.among(owners)
            if world is not None:
                parameters = [named[name] for name in names]
                world.broadcast(parameters)
                self._shared.append((parameters, world))
        return functions


class PipelineReducer(Reducer):
    """Reduces gradients over the replicas of a stage; those of shared weights also over the stages that own them.

    The step's own sums (loss, weight, flags) are reduced over the replicas with the gradients, and then once along the
    pipeline, so that all ranks have them.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], grid: Grid, pp_world: World, shared: Sequence[SharedParameters]
    ) -> None:
        super().__init__(parameters, grid)
        self._pp_world = pp_world
        self._num_stages_with = {p: world.world_size for group, world in shared for p in group}
        self._replicas = DdpReducer(parameters, grid.data) if grid.data.world_size > 1 else LocalReducer(parameters)
        own = set(self.parameters)
        chosen = [([p for p in group if p in own], world) for group, world in shared]
        self._of_shared = [DdpReducer(group, world) for group, world in chosen if group]

    def reduce(self, sums: StepSums) -> StepSums:
        totals = self._replicas.reduce(sums)
        for reducer in self._of_shared:
            reducer.reduce(StepSums())
        row = torch.tensor(totals.row(), dtype=torch.float64, device=self._pp_world.device)
        return StepSums.of(self._pp_world.all_reduce(row).tolist())

    def clip(self, max_norm: float) -> torch.Tensor:
        return clip_gradients(self.parameters, max_norm, self._grid, self._num_stages_with)
