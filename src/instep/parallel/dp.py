"""One process with several GPUs: PyTorch's DataParallel, for completeness.

It copies the model to every GPU in each forward pass, and its layers see one GPU's rows: BatchNorm's statistics and
dropout's noise depend on the number of GPUs, which they do under no other strategy. `ddp` has neither fault.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import data_parallel

from instep.parallel.single import Single
from instep.parallel.strategy import Example
from instep.world.device import accelerator_of


class _Replicated(nn.Module):
    """Stands before a model's own class, and sends each call of the model to copies of it."""

    def forward(self, *positional: Any, **named: Any) -> Any:
        if getattr(self, "_is_replica", False):
            return super().forward(*positional, **named)
        return data_parallel(self, positional, module_kwargs=named or None)


class Dp(Single):
    """The whole model on every GPU that this process sees."""

    name = "dp"

    def spread(self, model: nn.Module, example: Example | None = None) -> nn.Module:
        accelerator = accelerator_of(self.grid.world.device)
        num_gpus = accelerator.device_count() if accelerator is not None else 0
        if num_gpus < 2:
            self.said.append(
                f"strategy=dp spreads a batch over the GPUs of one process, and this one sees {num_gpus}: it trains as "
                "strategy=single does. For several processes use strategy=ddp with -n."
            )
            return super().spread(model, example)
        self.said.append(
            f"strategy=dp: one process drives {num_gpus} GPUs, copies the model to them in every step, and BatchNorm "
            "and dropout see one GPU's rows. strategy=ddp with -n auto is faster and gives the same answer as one GPU."
        )
        model = model.to(self.grid.world.device)
        kind = type(model)
        model.__class__ = type(f"Replicated{kind.__name__}", (_Replicated, kind), {})
        return model
