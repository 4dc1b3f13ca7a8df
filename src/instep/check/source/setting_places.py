"""Where the source changes how a model trains after it was made: its mode, a layer's number, an optimizer's setting."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from instep.check.source.module import SourceModule
from instep.check.source.rank_guards import guard_of_callers


def setting_place(modules: Sequence[SourceModule], key: str) -> tuple[str, int] | None:
    """Return the line that sets a number of an optimizer's groups by hand: `group["lr"] = …`, by one rank first."""
    return _first(modules, lambda node: _sets_entry(node, key))


def layer_place(modules: Sequence[SourceModule], key: str) -> tuple[str, int] | None:
    """Return the line that sets a layer's number, or switches the mode, by one rank first."""
    if key == "training":
        return _first(modules, _switches)
    return _first(modules, lambda node: _sets_attribute(node, key))


def _first(modules: Sequence[SourceModule], chosen: Callable[[ast.AST], bool]) -> tuple[str, int] | None:
    nodes = [(module, node) for module in modules for node in _ordered(module) if chosen(node)]
    guarded = [(module, node) for module, node in nodes if guard_of_callers(module, node) is not None]
    module, node = next(iter([*guarded, *nodes]), (None, None))
    return module.place(node) if module is not None and node is not None else None


def _ordered(module: SourceModule) -> Iterator[ast.stmt | ast.expr]:
    nodes = [node for node in ast.walk(module.tree) if isinstance(node, ast.stmt | ast.expr)]
    yield from sorted(nodes, key=lambda node: node.lineno)


def _targets(node: ast.AST) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []


def _sets_entry(node: ast.AST, key: str) -> bool:
    return any(
        isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and target.slice.value == key
        for target in _targets(node)
    )


def _sets_attribute(node: ast.AST, key: str) -> bool:
    return any(isinstance(target, ast.Attribute) and target.attr == key for target in _targets(node))


def _switches(node: ast.AST) -> bool:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and node.func.attr in ("eval", "train") and not node.args  # type: ignore[attr-defined]
