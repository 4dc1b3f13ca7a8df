"""A Task while it is written: a script's expressions, rewritten for its methods, and the fields that come of that."""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from instep.cli.moving.parts import ScriptParts, constant, name_of
from instep.world.device import ACCELERATORS

MARK = "COMPLETE"
"""Marks what the user has to complete."""
GIVEN = frozenset({"self", "model", "batch", "params", "optimizer", "num_steps", *vars(builtins)})
"""Names that a method of a Task has."""


@dataclass
class Writer:
    """The Task while it is written: its fields, and what could not be moved."""

    parts: ScriptParts
    fields: dict[str, Any] = field(default_factory=dict)
    todo: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    """Classes that are written anew."""

    def known(self) -> set[str]:
        """Return the names of a module's own definitions and imports."""
        names = set()
        for node in self.parts.tree.body:
            names |= set(bound_names(node))
        return names | {
            node.name for text in self.extra for node in ast.parse(text).body if isinstance(node, ast.ClassDef)
        }

    def rewritten(self, node: ast.expr, own: Iterable[str] = (), model: str = "") -> ast.expr:
        """Return an expression for a method of the Task; `own` are names that the method sets itself."""
        return _Rewrite(self, set(own), model).visit(copy.deepcopy(node))  # type: ignore[no-any-return]

    def method(self, signature: str, lines: list[str], what: str) -> str:
        """Return a method; mark it if it has no lines, or uses names that only the script knew."""
        body = [f"    def {signature}:"]
        if not lines:
            self.todo.append(f"{signature.partition('(')[0]}: {what}")
            return "\n".join([*body, f"        # {MARK}: {what}", "        raise NotImplementedError"])
        tree = ast.parse("\n".join(lines))
        own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        missing = sorted(used - own - GIVEN - self.known() - {"torch", "F", "nn"} - _arguments(tree))
        if missing:
            text = f"{', '.join(missing)} came from elsewhere in your script"
            self.todo.append(f"{signature.partition('(')[0]}: {text}")
            body.append(f"        # {MARK}: {text}")
        return "\n".join([*body, *(f"        {line}" for text in lines for line in text.splitlines())])


class _Rewrite(ast.NodeTransformer):
    """Replaces a script's variables: hyper-parameters by fields, others by what they were assigned."""

    def __init__(self, writer: Writer, own: set[str], model: str) -> None:
        self._writer, self._own, self._model = writer, own, model
        self._inside: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in ("to", *ACCELERATORS)
            and name_of(node.func.value) != "torch"
        ):
            return self.visit(node.func.value)  # type: ignore[no-any-return]
        if self._model and ast.unparse(node.func) in (self._model, f"{self._model}.forward", f"{self._model}.module"):
            node.func = ast.Name("model", ast.Load())
            node.args = [self.visit(argument) for argument in node.args]
            for entry in node.keywords:
                entry.value = self.visit(entry.value)
            return node
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        owner = ast.unparse(node.value)
        is_argument = owner in ("args", "opt", "config", "cfg", "hparams", "self.hparams", "self")
        if (
            is_argument
            and (value := constant(self._writer.parts, self._writer.parts.arguments.get(node.attr))) is not None
        ):
            return self._field(node.attr, value)
        attributes = self._writer.parts.attributes
        if owner == "self" and node.attr in attributes and ast.unparse(node) != self._model:
            return self.visit(copy.deepcopy(attributes[node.attr]))  # type: ignore[no-any-return]
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        parts, name = self._writer.parts, node.id
        top = {bound for top in parts.tree.body if not isinstance(top, ast.Assign) for bound in bound_names(top)}
        if not isinstance(node.ctx, ast.Load) or name in self._own or name in top or name in self._inside:
            return node
        if (value := constant(parts, node)) is not None:
            return self._field(name.lower(), value)
        if name not in parts.assigned or name == self._model:
            return node
        self._inside.append(name)
        made = self.visit(copy.deepcopy(parts.assigned[name][0]))
        self._inside.pop()
        return made  # type: ignore[no-any-return]

    def _field(self, name: str, value: Any) -> ast.AST:
        self._writer.fields.setdefault(name, value)
        return ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())


def bound_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]


def _arguments(tree: ast.AST) -> set[str]:
    return {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
