"""One process with several GPUs: PyTorch's DataParallel, for completeness.

It copies the model to every GPU in each forward pass, and its layers see one GPU's rows: BatchNorm's statistics and
dropout's noise depend on the number of GPUs, which they do under no other strategy. `ddp` has neither fault.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import data_parallel

from instep.core.mesh import Mesh
from instep.core.spec import TrainSpec
from instep.parallel.single import Single
from instep.parallel.strategy import NO_HINTS, ModelHints


class _Replicated(nn.Module):
    """Stands before a model's own class, and sends each call of the model to copies of it."""

    def forward(self, *positional: Any, **named: Any) -> Any:
        if getattr(self, "_is_replica", False):
            return super().forward(*positional, **named)
        return data_parallel(self, positional, module_kwargs=named or None)


class Dp(Single):
    """The whole model on every GPU that this process sees."""

    name = "dp"
    compiles_by_default = False

    @classmethod
    def serves(cls, spec: TrainSpec, mesh: Mesh) -> bool:
        return spec.strategy == "dp" and super().serves(spec, mesh)

    def spread(self, model: nn.Module, hints: ModelHints = NO_HINTS) -> nn.Module:
        num_gpus = torch.cuda.device_count() if self.grid.world.device.type == "cuda" else 0
        if num_gpus < 2:
            self.said.append(
                f"strategy=dp spreads a batch over the GPUs of one process, and this one sees {num_gpus}: it trains as "
                "strategy=single does. For several processes use strategy=ddp with -n."
            )
            return super().spread(model, hints)
        self.said.append(
            f"strategy=dp: one process drives {num_gpus} GPUs, copies the model to them in every step, and BatchNorm "
            "and dropout see one GPU's rows. strategy=ddp with -n auto is faster and gives the same answer as one GPU."
        )
        model = model.to(self.grid.world.device)
        kind = type(model)
        model.__class__ = type(f"Replicated{kind.__name__}", (_Replicated, kind), {})
        return model
