"""Which data is meant: the Task's evaluation sets, one of them by name, its training set, or a function's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from instep.core.errors import SpecError, TaskError
from instep.train.evaluation import evaluation_sets
from instep.train.source import module_of
from instep.train.task import Task

EVAL, TRAIN = "eval", "train"
_FUNCTION = re.compile(r"(.+\.py):(\w+)")


def choose_sets(task: Task, data: Any) -> dict[str, Any]:
    """Return the sets that are meant, by their names; the only one may have none.

    `data` is `eval` (all evaluation sets), the name of one of them, `train`, FILE.py:function, or a dataset itself.
    """
    if not isinstance(data, str):
        return evaluation_sets(data, task.collate)
    if (function := _FUNCTION.fullmatch(data)) is not None:
        return evaluation_sets(_call(Path(function[1]), function[2]), task.collate)
    own = task.eval_data()
    sets = {} if own is None else evaluation_sets(own, task.collate)
    if data in sets:
        return {data: sets[data]}
    if data == TRAIN:
        return {"": task.train_data()}
    name = type(task).__name__
    if data == EVAL and sets:
        return sets
    if data == EVAL:
        raise TaskError(f"{name} has no eval_data. Define it, or name other data: --data train or FILE.py:function.")
    named = ", ".join(filter(None, sets))
    known = f"the evaluation sets of {name}: {named}" if named else f"the only evaluation set of {name}"
    raise SpecError(f"data={data!r} is unknown. Use eval ({known}), train, a set's name, or FILE.py:function.")


def check_choice(data: Any) -> Any:
    """Return a choice that means the same in every process; raise SpecError for a file that is not there."""
    if isinstance(data, str) and (function := _FUNCTION.fullmatch(data)) is not None:
        path = Path(function[1]).resolve()
        if not path.is_file():
            raise SpecError(f"data={data}: {path} does not exist.")
        return f"{path}:{function[2]}"
    return data


def _call(path: Path, name: str) -> Any:
    function = getattr(module_of(path), name, None)
    if not callable(function):
        raise SpecError(f"data={path}:{name}: the file defines no function {name!r}. It returns a dataset.")
    return function()
