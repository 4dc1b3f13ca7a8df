"""How instep calls the methods of a Task."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from instep.core.errors import TaskError
from instep.data.curricula import Curriculum
from instep.data.kinds import first_rows
from instep.parallel.capture import Call, call_of
from instep.parallel.noise_patches import torchs_own_functions
from instep.train.scalars import loss_parts
from instep.train.task import Task

_EXAMPLE_ROWS = 2
HOW_TO_PREDICT = """Add to the Task what to predict, for instance
    def predict(self, model, batch):
        x, y = batch
        return {"label": model(x).argmax(1)}"""


def example_of(task: Task, seed: int) -> Call:
    """Return the arguments that a Task's loss calls its model with, for the first rows of the data."""
    batch, _ = first_rows(task.train_data(), _EXAMPLE_ROWS, task.collate, seed, on_bad_sample="skip")
    return call_of(task.loss, batch)


def train_data_of(task: Task, notice: Callable[[str], None]) -> Any:
    """Return a Task's training data; a curriculum without a difficulty of its own gets the Task's."""
    data, difficulty = task.train_data(), method_of(task, "difficulty")
    if isinstance(data, Curriculum) and data.difficulty is None and difficulty is not None:
        return data.with_difficulty(difficulty)
    if not isinstance(data, Curriculum) and difficulty is not None:
        notice(
            "difficulty() of the Task has no effect: return instep.data.curriculum(dataset, …) from train_data() to "
            "train on the easiest samples first."
        )
    return data


def model_of(task: Task) -> nn.Module:
    """Build a Task's model."""
    with torchs_own_functions():  # which torch.jit.script knows
        model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"{type(task).__name__}.model() gave a {type(model).__name__}; a torch.nn.Module is needed.")
    return model


def metrics_of(task: Task, model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return a Task's metrics, with its loss as one of them."""
    once = _Once(model)
    (mean, weight, scalars), values = loss_parts(task.loss(once, batch)), task.metrics(once, batch)
    if not isinstance(values, Mapping):
        raise TaskError(f"metrics returned a {type(values).__name__}; a dict of metrics by name is needed.")
    of_loss = {"loss": mean, **(scalars or {})}
    return {**{f"eval_{name}": (value, weight) for name, value in of_loss.items()}, **values}


def predictions_of(task: Task, model: nn.Module, batch: Any) -> Any:
    """Return a Task's predictions; without `predict`, what the model returns when the Task's loss calls it."""
    predict = method_of(task, "predict")
    if predict is not None:
        return predict(model, batch)
    once = _Once(model)
    task.loss(once, batch)
    if not once.was_called:
        raise TaskError(f"{type(task).__name__}.loss() did not call its model. {HOW_TO_PREDICT}")
    return once.output


def method_of(task: Task, name: str) -> Callable[..., Any] | None:
    """Return an optional method of a Task; None: it has none."""
    method = getattr(task, name, None)
    return method if callable(method) else None  # a hyper-parameter of that name is a number


class _Once:
    """A model that remembers its last answer: loss and metrics of one batch ask for the same."""

    training = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._arguments: tuple[Any, ...] | None = None
        self.output: Any = None

    @property
    def was_called(self) -> bool:
        """Whether it has an answer."""
        return self._arguments is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        known, arguments = self._arguments, (*positional, *named, *named.values())
        if known is None or len(known) != len(arguments) or not all(map(operator.is_, known, arguments)):
            self._arguments, self.output = arguments, self._model(*positional, **named)
        return self.output
