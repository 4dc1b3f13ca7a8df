"""The parts of a training script, and how expressions are looked at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LossParts:
    """How a script computes its loss: the batch, statements, the loss."""

    batch: ast.expr
    """What the loop unpacks a batch into."""
    body: list[ast.stmt]
    """The statements that the loss depends on."""
    value: ast.expr
    model: str
    """How the script calls its model, as text: `model`, `self.net`, `self`."""


@dataclass
class ScriptParts:
    """What was found in a script."""

    tree: ast.Module
    source: str
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    """The expressions that each variable is assigned, in order."""
    arguments: dict[str, ast.expr] = field(default_factory=dict)
    """Defaults of the script's own command line, and of a LightningModule's arguments."""
    attributes: dict[str, ast.expr] = field(default_factory=dict)
    """What a LightningModule assigns to its attributes."""
    model: ast.expr | None = None
    optimizer: ast.Call | None = None
    scheduler: ast.Call | None = None
    scheduler_interval: str = "epoch"
    train_data: ast.expr | None = None
    eval_data: ast.expr | None = None
    loss: LossParts | None = None
    metric: ast.Compare | None = None
    """The comparison whose mean is the accuracy."""
    options: dict[str, ast.expr] = field(default_factory=dict)
    """Options of `instep train`, by name."""
    lightning: ast.ClassDef | None = None
    trainer: ast.Call | None = None
    """The call of the Hugging Face Trainer."""


def name_of(node: ast.AST | None) -> str:
    """Return the last name of an expression: `SGD` of `torch.optim.SGD(…)`."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword of a call."""
    return next((entry.value for entry in call.keywords if entry.arg == name), None)


def calls(node: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Yield the calls of functions with these names."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and name_of(inner) in names:
            yield inner


def constant(parts: ScriptParts, node: ast.expr | None) -> Any:
    """Return a number or text that an expression stands for; None: it is not known before the script runs."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = constant(parts, node.operand)
        return -value if isinstance(value, int | float) else None
    name = name_of(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    if isinstance(node, ast.Attribute) and name in parts.arguments:
        return constant(parts, parts.arguments[name])
    values = parts.assigned.get(name, []) if isinstance(node, ast.Name) else []
    if len(values) == 1:
        return constant(parts, values[0])
    return constant(parts, parts.arguments[name]) if not values and name in parts.arguments else None
