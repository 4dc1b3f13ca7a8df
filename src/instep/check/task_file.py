"""A file that defines a Task: instep trains it, under the same observers as any script."""

from __future__ import annotations

import ast
from pathlib import Path

from instep.check.source.module import SourceModule
from instep.check.watched import Script

REMARK = (
    "{name} defines a Task. `instep train` trains it while it is watched, in a temporary run directory. How data, "
    "gradients, schedules and checkpoints are handled is instep's part then (docs/contract.md); `instep verify` "
    "compares the results at several numbers of processes."
)
_BASES = ("instep.Task", "instep.train.task.Task")


def defines_task(path: Path) -> bool:
    """Return whether a file defines a class on `instep.Task`, as far as its source tells."""
    if not path.is_file():
        return False
    module = SourceModule.read(path)
    classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    return any(module.name_of(base) in _BASES for node in classes for base in node.bases)


def script_of_task(task: str, argv: tuple[str, ...], run_dir: str) -> Script:
    """Return the script that trains `FILE.py[:Class]`, as `instep train` does in each rank of another launcher."""
    own = () if any(word.startswith("--run-dir") for word in argv) else ("--run-dir", run_dir)
    return Script("instep", ("train", task, *argv, *own), as_module=True)
