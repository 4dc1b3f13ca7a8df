"""Both at once: layers shared by a team of ranks, and each rank's parts of them cut over the ranks along fsdp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from instep.core.errors import SpecError
from instep.parallel.batch_context import BatchContext
from instep.parallel.deferred import Deferred
from instep.parallel.fsdp import Fsdp, Sharding
from instep.parallel.strategy import ModelHints
from instep.parallel.tensor.slice import Slice
from instep.parallel.tensor.strategy import split_model
from instep.parallel.tensor.team import Team
from instep.world.grid import Grid


class ShardedTensor(Fsdp):
    """Layers shared along tp, their parts cut along fsdp, copies of all that along dp."""

    name: ClassVar[str] = "fsdp×tensor"
    axes = ("fsdp", "tp")

    def __init__(self, grid: Grid, context: BatchContext, sharding: Sharding) -> None:
        super().__init__(grid, context, sharding)
        if sharding.meta_init:
            raise SpecError(
                f"meta_init: how layers are split along tp({grid.mesh.tp}) is found by trying, and a model without its "
                "numbers cannot be tried. Leave it out, or shard along fsdp alone."
            )

    def shard(self, model: nn.Module, hints: ModelHints, deferred: Deferred | None = None) -> None:
        self.said.append(split_model(model, self.grid, Team.of(self.grid), hints))
        super().shard(model, hints, deferred)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # First of all: FSDP hangs on to what comes in, by a way that knows nothing of parts.
                module.register_forward_pre_hook(_join_inputs, prepend=True, with_kwargs=True)


def _join_inputs(_module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return tree_map_only(Slice, lambda each: each.whole("a block of fsdp"), (args, kwargs))
