"""How a script computes its loss: from the lines of its loop to those that the loss depends on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.cli.moving.parts import LossParts


def loss_parts(target: ast.expr, body: list[ast.stmt], value: ast.expr) -> LossParts:
    """Return what a loss depends on: assignments before it, from the last to the first."""
    needed, kept = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}, []
    for statement in reversed([node for outer in body for node in _flat(outer)]):
        names = {node.id for goal in statement.targets for node in ast.walk(goal) if isinstance(node, ast.Name)}
        if names & needed:
            kept.append(statement)
            needed |= {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
    kept.reverse()
    if kept and isinstance(value, ast.Name) and ast.unparse(kept[-1].targets[0]) == value.id:
        value = kept.pop().value
    return LossParts(target, list(kept), value, _model_called([*(node.value for node in kept), value]))


def _flat(node: ast.stmt) -> Iterator[ast.Assign]:
    """Yield the assignments of a statement, also those under `with autocast():`."""
    if isinstance(node, ast.Assign):
        yield node
    elif isinstance(node, ast.With):
        for inner in node.body:
            yield from _flat(inner)


def _model_called(values: list[ast.expr]) -> str:
    """Return what is called as the model: a variable named so, a LightningModule, or an attribute of one."""
    called = [ast.unparse(node.func) for value in values for node in ast.walk(value) if isinstance(node, ast.Call)]
    usual = [name for name in called if re.fullmatch(r"(ddp_|my_)?(model|net|network|module)|self", name)]
    own = [name for name in called if re.fullmatch(r"self\.\w+", name) and not re.search("loss|crit|metric|acc", name)]
    return (usual or own or ["model"])[0]
