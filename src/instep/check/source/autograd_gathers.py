"""Autograd functions of the script's own that gather, and whose backward pass asks the other ranks for nothing."""

from __future__ import annotations

import ast

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import Function, calls_below
from instep.check.source.module import SourceModule
from instep.check.source.reaching import syncs

_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single", "_all_gather_base")


def returned_alone(module: SourceModule, name: str) -> ast.Return | None:
    """Return what `backward` of a gathering autograd function returns, if it issues no collective; else None."""
    owner = next((node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef) and node.name == name), None)
    if owner is None or not any(ast.unparse(base).endswith("Function") for base in owner.bases):
        return None
    methods = {item.name: item for item in owner.body if isinstance(item, Function)}
    forward, backward = methods.get("forward"), methods.get("backward")
    if forward is None or backward is None:
        return None
    if not any(call.last in _GATHERS for call in calls_below(module, forward)):
        return None
    if any(is_collective(call) or syncs(call) or "reduce" in call.last for call in calls_below(module, backward)):
        return None
    return next((node for node in ast.walk(backward) if isinstance(node, ast.Return)), None)
