"""What to train. A Task is a dataclass: its fields are the hyper-parameters, its methods the training."""

from __future__ import annotations

import dataclasses
import dis
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from instep.events.schema import StepRecord


class Task:
    """Subclass this with `@dataclass(kw_only=True)` and define the first four methods; the rest are optional.

    `loss` and `metrics` call `model(...)` exactly once and use nothing else of it.
    """

    def model(self) -> nn.Module:
        """Build the model, on CPU, with torch's usual initialisation: the seed is set."""
        raise NotImplementedError

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer; `params` is a list of those that need a gradient, `params.named` has their names."""
        raise NotImplementedError

    def train_data(self) -> Any:
        """Give a dataset with a length; see docs/data.md for what is read by the batch."""
        raise NotImplementedError

    def loss(self, model: Callable[..., Any], batch: Any) -> Any:
        """Give the mean over the batch's samples, or (mean, weight) where the weight is not their number."""
        raise NotImplementedError

    def eval_data(self) -> Any:
        """Give the evaluation set, or None."""
        return None

    def metrics(self, model: Callable[..., Any], batch: Any) -> dict[str, Any]:
        """Give values by sample, (values, weights), or objects with update, compute and summable tensors."""
        del model, batch
        return {}

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        """Give a learning-rate scheduler that is stepped once a global step, or None."""
        del optimizer, num_steps

    if TYPE_CHECKING:  # not there otherwise: a hyper-parameter of that name would get it for its default

        def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
            """Give the modules that `--strategy fsdp` gathers, and `--recompute` computes again, one at a time.

            Found by itself where a model has repeated blocks.
            """

        def layers(self, model: nn.Module) -> Sequence[Callable[..., Any]]:
            """Give the layers (modules or functions) that, applied one after the other, make up the model.

            Asked only by `--strategy pipeline`, which finds them by itself in most models. The first gets what `loss`
            calls the model with, each other one what the one before it gave: a tensor, or a tuple of tensors.
            """

        def tensor_plan(self, model: nn.Module) -> Mapping[str, Any]:
            """Say how `--strategy tensor` splits layers, by their paths; without it a plan is found (docs/tensor.md).

            Words as Hugging Face spells them (colwise, rowwise, colwise_rep, replicate), or PyTorch's ParallelStyles;
            in a path `*` stands for any one name.
            """

    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples; torch's default_collate where it is None."""

    def on_step(self, record: StepRecord) -> None:
        """Look at each step; runs on rank 0 only."""

    def stop(self, record: StepRecord) -> bool:
        """End the training early; asked on rank 0 after each step, and all ranks follow."""
        del record
        return False


def fields_of(cls: type[Task]) -> list[dataclasses.Field[Any]]:
    """The fields of a Task's class that can be set; none if it is no dataclass."""
    fields: tuple[dataclasses.Field[Any], ...] = (
        dataclasses.fields(cast(Any, cls)) if dataclasses.is_dataclass(cls) else ()
    )
    return [field for field in fields if field.init]


def field_names(cls: type[Task]) -> list[str]:
    """Their names."""
    return [field.name for field in fields_of(cls)]


def overrides(task: Task, method: str) -> bool:
    """Tell whether a Task brings its own version of a method."""
    return getattr(type(task), method) is not getattr(Task, method)


def depends_on_num_steps(task: Task) -> bool:
    """Tell whether the Task's scheduler looks at the number of steps, so that it cannot be raised later."""
    if not overrides(task, "scheduler"):
        return False
    function = type(task).scheduler
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount < 3:
        return True  # it cannot be told, so it might
    name = code.co_varnames[2]
    return any(step.argval == name and step.opname != "MAKE_CELL" for step in dis.get_instructions(function))
