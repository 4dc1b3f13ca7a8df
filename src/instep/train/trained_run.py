"""A run that has checkpoints, as its directory describes it: the Task, the spec, which checkpoint is meant.

Nothing here changes the directory, whose run may still be training.
"""

from __future__ import annotations

import ast
import enum
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from instep.checkpoint.manifest import MANIFEST, checkpoint_name
from instep.checkpoint.rundir import SPEC, RunDirectory
from instep.core.errors import CheckpointError, SpecError
from instep.core.options import OptionScope, options_of
from instep.core.spec import TrainSpec
from instep.train.directory import plain_value
from instep.train.result import best_checkpoint
from instep.train.source import make_task, module_of, task_class
from instep.train.task import Task, fields_of


@dataclass(frozen=True)
class TrainedRun:
    """What spec.json says of a run."""

    directory: RunDirectory
    spec: TrainSpec
    """How it was trained, without where: processes and nodes are this command's."""
    task_name: str
    task_file: str | None
    task_fields: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> TrainedRun:
        """Read the description of a run."""
        if not (path / SPEC).is_file():
            where = "does not exist" if not path.exists() else f"is not a run directory: it has no {SPEC}"
            inside = path.parent.parent
            hint = f" Did you mean {inside} --checkpoint {path.name}?" if (path / MANIFEST).is_file() else ""
            raise CheckpointError(f"{path} {where}. Give the directory of a run, for instance runs/digits-….{hint}")
        directory = RunDirectory(path)
        described = directory.description()
        task, saved = described["task"], described["spec"]
        wanted = {
            option.name: saved[option.name]
            for option in options_of(TrainSpec)
            if option.scope in (OptionScope.RECIPE, OptionScope.OPERATIONAL) and option.name in saved
        }
        try:
            spec = TrainSpec(
                **{**wanted, "init_from": None, "init_partial": False, "compile": None, "recompute": False}
            )
        except (SpecError, TypeError) as error:
            raise CheckpointError(f"{path / SPEC} does not describe a training: {error}") from error
        return cls(directory, spec, str(task["name"]), task.get("file"), task["fields"])

    def task(self, where: str | None = None, assignments: Sequence[str] = ()) -> tuple[Task, Path]:
        """Load the Task that the run was trained with, and return it with its file.

        `where` is another FILE.py[:Class] to load it from; `assignments` (`name=value`) change fields.
        """
        if where is None and self.task_file is None:
            raise SpecError(
                f"{self.directory.path} does not say which file defines its Task {self.task_name}: it was trained in a "
                "notebook, by a loop of one's own, or by an earlier version. Give --task FILE.py[:Class]; in Python, "
                "task=…."
            )
        file, _, name = where.partition(":") if where is not None else (str(self.task_file), "", self.task_name)
        path = Path(file)
        if where is None and not path.is_file():
            raise SpecError(
                f"{path}, which defined the run's Task {self.task_name}, is not there any more. Give --task FILE.py if "
                "it was moved."
            )
        cls = task_class(module_of(path), path, name)
        return self._with_fields(cls, assignments), path

    def _with_fields(self, cls: type[Task], assignments: Sequence[str]) -> Task:
        """Make a Task with the run's values of its fields, or with those that are assigned."""
        assigned = {text.partition("=")[0] for text in assignments}
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for field in fields_of(cls):
            if field.name in self.task_fields and field.name not in assigned:
                default = field.default if field.default_factory is MISSING else field.default_factory()
                values[field.name] = value_of(field.name, self.task_fields[field.name], hints[field.name], default)
        return make_task(cls, assignments, values)

    def checkpoint_named(self, choice: str) -> str | None:
        """Return the name of the checkpoint that `best`, `best:METRIC` or a step means; None for `last`."""
        path, names = self.directory.path, self.directory.names()
        if not names:
            raise CheckpointError(f"{path} has no checkpoint yet. Wait until the training has saved one.")
        if choice == "last":
            return None
        if choice == "best" or choice.startswith("best:"):
            kept = best_checkpoint(path, choice.partition(":")[2] or True)
            return kept.name
        steps = re.fullmatch(r"(?:step-)?(\d+)", choice)
        if steps is None:
            raise SpecError(f"checkpoint={choice!r} is unknown. Give last, best, best:METRIC, or the number of a step.")
        name = checkpoint_name(int(steps[1]))
        if name not in names:
            known = ", ".join(str(int(name.removeprefix("step-"))) for name in names) or "none"
            raise CheckpointError(f"{path} has no checkpoint of step {int(steps[1])}. It has: {known}.")
        return name


def value_of(name: str, recorded: Any, kind: Any, default: Any) -> Any:
    """Return the value of a field from what spec.json holds of it: the one that would be recorded as this."""
    for value in (default, *_readings(recorded, kind)):
        if value is not MISSING and type(plain_value(value)) is type(recorded) and plain_value(value) == recorded:
            return value
    raise SpecError(f"the run's {name} was {recorded!r:.60}, which {SPEC} cannot hold whole. Give {name}=VALUE.")


def _readings(recorded: Any, kind: Any) -> list[Any]:
    """Return what a recorded value may stand for; that of a field that may be a text is one."""
    if not isinstance(recorded, str) or _may_be(recorded, kind):
        return [recorded]
    readings: list[Any] = []
    try:
        readings.append(ast.literal_eval(recorded))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        path = re.fullmatch(r"(?:Posix|Windows)?Path\((.*)\)", recorded, re.S)
        readings += [Path(text) for text in _texts(path[1])] if path else []
    for part in (kind, *typing.get_args(kind)):
        readings += list(part) if isinstance(part, enum.EnumMeta) else []
    return readings


def _may_be(text: str, kind: Any) -> bool:
    """Return whether a text is a value of an annotated type."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return text in arguments
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return kind in (str, Any) or (is_union and any(_may_be(text, part) for part in arguments))


def _texts(literal: str) -> list[str]:
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        return []
    return [value] if isinstance(value, str) else []
