"""All strategies, and the choice of one."""

from instep.core.spec import TrainSpec
from instep.parallel.batch_context import BatchContext
from instep.parallel.ddp import Ddp
from instep.parallel.dp import Dp
from instep.parallel.exact import Exact
from instep.parallel.exact_fsdp import ExactFsdp
from instep.parallel.fsdp import Fsdp
from instep.parallel.pipeline.strategy import Pipeline
from instep.parallel.single import Single
from instep.parallel.strategy import Strategy
from instep.parallel.tensor.strategy import ShardedTensor, Tensor
from instep.world.grid import Grid

STRATEGIES: tuple[type[Strategy], ...] = (
    Pipeline,
    ExactFsdp,
    Exact,
    ShardedTensor,
    Fsdp,
    Tensor,
    Ddp,
    Dp,
    Single,
)
"""The first that serves a spec and its mesh is chosen."""


def choose_strategy(spec: TrainSpec, grid: Grid, context: BatchContext) -> Strategy:
    """Return the strategy for a spec on these ranks. Called on all ranks."""
    strategy = next(kind for kind in STRATEGIES if kind.serves(spec, grid.mesh)).of(spec, grid, context)
    if grid.mesh.size == 1 and any(kind.name == spec.strategy and kind.is_partial for kind in STRATEGIES):
        strategy.said.append(
            f"strategy={spec.strategy} on one process: there is nothing to distribute; as strategy=single."
        )
    return strategy
