"""Whether a script continues a training from what it loads, and whether a file is written once, after training."""

from __future__ import annotations

import ast
import re

from instep.check.source.functions import Function, call_sites, function_around, loops_around, trains
from instep.check.source.module import SourceModule

_LOADS = ("torch.load", "load_checkpoint", "load_state", "load_file")
_RESUMES = re.compile(r"resum|restart|start_epoch|first_epoch|preempt", re.IGNORECASE)
_DEPTH = 3


def resumes_training(module: SourceModule) -> bool:
    """Return whether a file loads something before it trains, or speaks of resuming."""
    if any(_RESUMES.search(line) for line in module.lines):
        return True
    return any(_trains_after(module, call.node, _DEPTH) for call in module.calls_of(*_LOADS))


def is_written_once(module: SourceModule, node: ast.AST, depth: int = _DEPTH) -> bool:
    """Return whether no loop contains a node, or the calls of its function, in a file that trains: it is at the end."""
    if not any(True for _ in module.calls_of("backward", "manual_backward")):
        return False
    if any(True for _ in loops_around(module, node)):
        return False
    function = function_around(module, node)
    if not isinstance(function, Function):
        return True
    sites = call_sites(module, function)
    if not sites or not depth:  # the entry of a script; a method may be a hook that a framework calls
        return not any(isinstance(outer, ast.ClassDef) for outer in module.around(function))
    return all(is_written_once(module, site.node, depth - 1) for site in sites)


def _trains_after(module: SourceModule, node: ast.AST, depth: int) -> bool:
    function = function_around(module, node)
    line = node.lineno  # type: ignore[attr-defined]
    loops = [loop for loop in ast.walk(function) if isinstance(loop, ast.For | ast.While)]
    if any(trains(module, loop) and (loop.lineno > line or node in set(ast.walk(loop))) for loop in loops):
        return True
    sites = call_sites(module, function) if isinstance(function, Function) and depth else []
    return any(_trains_after(module, site.node, depth - 1) for site in sites)
