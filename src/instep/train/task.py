"""The Task: what to train. Its fields are the hyper-parameters, its methods define the training."""

from __future__ import annotations

import dataclasses
import dis
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from instep.core.errors import TaskError
from instep.events.schema import EvalRecord, SaveRecord, StepRecord


class Task:
    """Subclass this with `@dataclass(kw_only=True)` and define the first four methods; the rest are optional.

    `loss` and `metrics` call `model(...)` exactly once and use nothing else of it.
    """

    def model(self) -> nn.Module:
        """Build the model, on CPU, with torch's usual initialisation: the seed is set."""
        raise NotImplementedError

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer; `params` is a list of the parameters to train, `params.named` has their names, too."""
        raise NotImplementedError

    def train_data(self) -> Any:
        """Return a dataset with a length; docs/data.md says which kinds are read by the batch."""
        raise NotImplementedError

    def loss(self, model: Callable[..., Any], batch: Any) -> Any:
        """Return the mean over the batch's samples, or (mean, weight) where the weight is not their number.

        A dict, {"loss": mean, "weight": …, "kl": …}, has means to log beside it.
        """
        raise NotImplementedError

    def eval_data(self) -> Any:
        """Return the evaluation set, a dict of several by name, or None."""
        return None

    def metrics(self, model: Callable[..., Any], batch: Any) -> dict[str, Any]:
        """Return values by sample, (values, weights), or objects with update, compute and tensors that can be added."""
        del model, batch
        return {}

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        """Return a learning-rate scheduler, which is stepped once a global step, or None."""
        del optimizer, num_steps

    if TYPE_CHECKING:  # absent at run time: it would be the default of a hyper-parameter with that name

        def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
            """Return the modules that `--strategy fsdp` gathers, and `--recompute` computes again, one at a time.

            Without it they are the model's repeated blocks.
            """

        def difficulty(self, sample: Any) -> float:
            """Return how hard a training sample is, higher for harder ones: for `instep.data.curriculum`."""

        def frozen(self, step: int, epoch: int) -> Iterable[str]:
            """Return what is not trained in a step (from 1) of an epoch (from 0): parameters, modules or patterns.

            Called on all ranks before each step; it depends on the two numbers and on nothing else.
            """

        def layers(self, model: nn.Module) -> Sequence[Callable[..., Any]]:
            """Return the layers (modules or functions) that, applied one after the other, make up the model.

            Only `--strategy pipeline` calls it, and finds the layers of most models without it. The first layer gets
            the arguments with which `loss` calls the model, each other layer what the one before it returned: a
            tensor, or a tuple of tensors.
            """

        def predict(self, model: Callable[..., Any], batch: Any) -> Any:
            """Return what `instep predict` writes for a batch: a tensor with a row for each sample, or a dict of them.

            Without it, that is what the model returns when `loss` calls it.
            """

        def preprocess(self) -> Mapping[str, Any]:
            """Return what is fitted to the data, by name: scalers, vocabularies, plain values.

            Called once, when a run is new, before the model is built, on all ranks. Afterwards `self.fitted` has it: in
            training, evaluation and prediction, in `load_model`, and when the run continues.
            """

        def search_space(self, trial: Any) -> None:
            """Suggest values for fields and options, by their names, to a trial of `instep tune` (docs/tune.md).

            `trial` is Optuna's: `trial.suggest_float("lr", 1e-5, 1e-1, log=True)`. What is suggested may depend on what
            was suggested before, and on nothing else.
            """

        def sync_buffers(self) -> Mapping[str, str]:
            """Return how ranks agree on buffers that the model changes in its forward pass, by name or pattern.

            "mean": each rank's value with its share of the rows; "sum": all ranks' changes added up; "rank0".
            """

        def tensor_plan(self, model: nn.Module) -> Mapping[str, Any]:
            """Return how `--strategy tensor` splits layers, by path; without it a plan is searched (docs/tensor.md).

            Words as Hugging Face spells them (colwise, rowwise, colwise_rep, replicate), or PyTorch's ParallelStyles;
            in a path `*` stands for any one name.
            """

    fitted: Mapping[str, Any] = MappingProxyType({})
    """What `preprocess()` returned, by name."""
    run_dir: Path | None = None
    """The run's directory, once a training has begun."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; None: torch's default_collate."""

    def on_step(self, record: StepRecord) -> None:
        """Receive the record of each step; called on rank 0 only."""

    def on_eval(self, record: EvalRecord) -> None:
        """Receive the record of each evaluation; called on rank 0 only."""

    def on_save(self, record: SaveRecord) -> None:
        """Receive the record of each checkpoint that is complete on disk; called on rank 0 only."""

    def save_files(self, folder: Path) -> None:
        """Write what belongs to the model besides its weights, a tokenizer say, into a folder; exports carry it along.

        Called once, on rank 0, before the first step.
        """

    def stop(self, record: StepRecord) -> bool:
        """Return whether to end the training early; called on rank 0 after each step, and all ranks follow."""
        del record
        return False


def fields_of(cls: type[Task]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a Task's class that can be set; none if it is no dataclass."""
    return [field for field in dataclasses.fields(cls) if field.init] if dataclasses.is_dataclass(cls) else []


def field_names(cls: type[Task]) -> list[str]:
    """Return the names of the fields that can be set."""
    return [field.name for field in fields_of(cls)]


def overrides(task: Task, method: str) -> bool:
    """Return whether a Task overrides a method."""
    return getattr(type(task), method) is not getattr(Task, method)


def check_fields(task: Task) -> None:
    """Raise TaskError if a field of a Task hides one of its methods."""
    for name in field_names(type(task)):
        if name != "collate" and callable(getattr(Task, name, None)):
            raise TaskError(
                f"{type(task).__name__}.{name} is a field, and {name}() is a method of every Task: the field hides it. "
                f"Rename the field, for instance {name}_name."
            )


def depends_on_num_steps(task: Task) -> bool:
    """Return whether the Task's scheduler reads the number of steps, so that this cannot be raised later."""
    if not overrides(task, "scheduler"):
        return False
    function = type(task).scheduler
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount < 3:
        return True  # unknown, so it might
    name = code.co_varnames[2]
    return any(step.argval == name and step.opname != "MAKE_CELL" for step in dis.get_instructions(function))
