"""One process with several GPUs: PyTorch's DataParallel, for completeness.

It copies the model to every GPU in each forward pass, and its layers see one GPU's rows. So BatchNorm's statistics and
dropout's noise depend on the number of GPUs, as under no other strategy. Use `ddp`.
"""

from typing import Any

from torch import nn
from torch.nn.parallel import data_parallel

from instep.core.mesh import Mesh
from instep.core.spec import TrainSpec
from instep.parallel.class_change import add_base
from instep.parallel.single import Single
from instep.parallel.strategy import ModelHints
from instep.world.device import accelerator_of


class _Replicated(nn.Module):
    """Comes before a model's own class, and runs each call of the model on copies of it."""

    def forward(self, *positional: Any, **named: Any) -> Any:
        if getattr(self, "_is_replica", False):
            return super().forward(*positional, **named)
        return data_parallel(self, positional, module_kwargs=named or None)


class Dp(Single):
    """The whole model on every GPU that this process sees."""

    name = "dp"
    allows_channels_last = False
    compiles_by_default = False

    @classmethod
    def serves(cls, spec: TrainSpec, mesh: Mesh) -> bool:
        return spec.strategy == "dp" and super().serves(spec, mesh)

    def spread(self, model: nn.Module, hints: ModelHints) -> nn.Module:
        accelerator = accelerator_of(self.grid.world.device)
        num_gpus = accelerator.device_count() if accelerator is not None else 0
        if num_gpus < 2:
            self.said.append(
                f"strategy=dp splits a batch over the GPUs of one process, and this process sees {num_gpus}: it trains "
                "as strategy=single does. For several processes use strategy=ddp with -n."
            )
            return super().spread(model, hints)
        self.said.append(
            f"strategy=dp: one process uses {num_gpus} GPUs and copies the model to them in every step, and BatchNorm "
            "and dropout see one GPU's rows. strategy=ddp with -n auto is faster and gives the same result as one GPU."
        )
        model = model.to(self.grid.world.device)
        add_base(model, _Replicated)
        return model
