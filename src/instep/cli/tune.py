"""`instep tune`: find settings of a training by measurement."""

from __future__ import annotations

from typing import Any

from instep.cli.command import TASK, VALUES, command, make_spec
from instep.cli.tune_find import FIND_OPTIONS, find, refuse_without_find
from instep.core.errors import SpecError
from instep.core.finders import FINDER_NAMES
from instep.core.options import NODES
from instep.core.spec import TrainSpec


@command(
    "Find a setting of a training by measurement: --find lr, batch-size, workers, threads or processes.",
    TASK,
    VALUES,
    *FIND_OPTIONS,
    spec=TrainSpec,
    takes=lambda option: option.group != NODES,
    instead={"json": {"help": "print what was found as one line of JSON, and everything else to standard error"}},
)
def tune(task: str, values: list[str] | None, **options: Any) -> int:
    """Find a setting of a file's Task."""
    found = {option.name: options.pop(option.name) for option in FIND_OPTIONS}
    if found["find"] is None:
        refuse_without_find(**found)
        raise SpecError(f"say what to find: --find {', '.join(FINDER_NAMES)}.")
    return find(task, values or [], make_spec(TrainSpec, options), **found)
