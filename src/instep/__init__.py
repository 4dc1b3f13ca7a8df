"""Train a PyTorch model on one process, many GPUs or many machines; only the speed depends on their number."""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

# The package `instep.train` and the function `instep.train` share a name, and so do those of `tune`. The packages are
# imported first, which binds them here once and for all; the functions below then take the names over.
# `from instep.train.x import y` goes through sys.modules and still finds the package.
import instep.train
import instep.tune  # noqa: F401
from instep.core.errors import (
    CheckpointError,
    DataError,
    EnvironmentFailed,
    InstepError,
    NumericsError,
    RanksFailed,
    SpecError,
    TaskError,
)
from instep.core.spec import TrainSpec
from instep.core.version import __version__
from instep.events.schema import StepRecord

if TYPE_CHECKING:
    from instep import data
    from instep.cli.evaluate import evaluate_here as evaluate
    from instep.cli.predict import predict_here as predict
    from instep.cli.train import main
    from instep.parallel.row_noise import bernoulli, normal, rand, rand_like, randint, randint_like, randn, randn_like
    from instep.train.result import Result, load_model
    from instep.train.task import Task
    from instep.train.worker import start
    from instep.tune.finders.finder import Finding
    from instep.tune.result import TuneResult

__all__ = [
    "CheckpointError",
    "DataError",
    "EnvironmentFailed",
    "Finding",
    "InstepError",
    "NumericsError",
    "RanksFailed",
    "Result",
    "SpecError",
    "StepRecord",
    "Task",
    "TaskError",
    "TrainSpec",
    "TuneResult",
    "__version__",
    "bernoulli",
    "data",
    "evaluate",
    "load_model",
    "main",
    "normal",
    "predict",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "start",
    "train",
    "tune",
]

# What needs torch is imported when it is asked for: the command starts its workers before it imports torch.
_NOISE = ("bernoulli", "normal", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like")
_LAZY = {
    **dict.fromkeys(_NOISE, "instep.parallel.row_noise"),
    "Finding": "instep.tune.finders.finder",
    "Result": "instep.train.result",
    "Task": "instep.train.task",
    "TuneResult": "instep.tune.result",
    "evaluate": "instep.cli.evaluate",
    "load_model": "instep.train.result",
    "main": "instep.cli.train",
    "predict": "instep.cli.predict",
    "start": "instep.train.worker",
}
_ELSEWHERE = {"evaluate": "evaluate_here", "predict": "predict_here"}  # there, the name is a command's


def train(task: Any, **options: Any) -> Result:
    """Train a Task, on this process or on several, and return how it ended.

    The options are the fields of `TrainSpec`: epochs, batch_size, processes, run_dir, …
    """
    state = random.getstate()
    from instep.cli.conduct import train_here

    random.setstate(state)  # some of what is imported draws a number
    return train_here(task, **options)


def tune(task: Any, space: Any = None, *, find: str | None = None, **options: Any) -> TuneResult | Finding:
    """Search hyper-parameters of a Task, and return all trials and the best; or find a setting by measurement.

    `space` gives a range or a list of choices by the name of a field or option: {"lr": "1e-5..1e-1:log", "hidden": [64,
    128]}. The options are those of `instep tune` (trials, metric, sampler, pruner, parallel, …) and of `instep.train`.
    `find` names a setting (lr, batch-size, workers, threads, processes), with the options `over` and `rounds`.
    """
    state = random.getstate()
    from instep.cli.tune import tune_here
    from instep.cli.tune_find import find_here

    random.setstate(state)  # some of what is imported draws a number
    if find is None:
        return tune_here(task, space or {}, **options)
    if space:
        raise SpecError(f"find={find} measures one setting, and space is for a search. Give one of them.")
    return find_here(task, find, **options)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "data":
        return importlib.import_module("instep.data")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), _ELSEWHERE.get(name, name))
    raise AttributeError(f"module 'instep' has no attribute {name!r}")
