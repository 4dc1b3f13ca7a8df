"""Read spec.json and result.json for a report; what is missing or damaged is said, and nothing raised."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.core.errors import InstepError
from instep.core.options import OptionScope, options_of
from instep.core.spec import TrainSpec
from instep.monitor.report.facts import Recipe
from instep.monitor.run_files import read_object

_NOT_REPEATED = (OptionScope.NODE, OptionScope.OUTPUT)


def read_recipe(run_dir: Path, complaints: list[str]) -> Recipe:
    """Return what spec.json says of a run."""
    described = read_object(run_dir / "spec.json", complaints)
    task = _mapping(described.get("task"))
    file, fields = task.get("file"), _mapping(task.get("fields"))
    name = str(task.get("name", ""))
    options, why = _options(_mapping(described.get("spec")))
    if not described:
        why = "the run has no spec.json"
    elif not isinstance(file, str):
        file, why = None, "its Task is not in a file (a notebook, or a loop of its own)"
    command = None
    if not why:
        values = [f"{key}={_text(value)}" for key, value in fields.items()]
        command = shlex.join(["instep", "train", f"{file}:{name}", *values, *options])
    return Recipe(task=name, file=file, fields=fields, command=command, why_no_command=why)


def wrapped(command: str, width: int = 88) -> str:
    """Return a command on several lines, each continued by a backslash, where one would be too long."""
    lines: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}" if lines else word)
    return " \\\n".join(lines)


def _options(values: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the options that make the same training again, and why they cannot be given."""
    repeated = {option.name for option in options_of(TrainSpec) if option.scope not in _NOT_REPEATED}
    taken = {name: value for name, value in values.items() if name in repeated | {"processes"}}
    try:
        return TrainSpec(**taken).words(), ""
    except (InstepError, TypeError, ValueError) as error:
        return [], f"another version of instep wrote its spec.json ({error})"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else repr(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
