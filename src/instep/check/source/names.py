"""Names in the source: whether files mention one, what a line assigns, which classes they define. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from instep.check.source.module import Call, SourceModule

SHARED_INPUT = frozenset(
    {
        "parallelize_module",
        "PipelineStage",
        "ScheduleGPipe",
        "Schedule1F1B",
        "context_parallel",
        "tp_plan",
        "TorchTensorParallelPlugin",
        "ParallelismConfig",
        "distribute_module",
        "ColwiseParallel",
    }
)
"""Names of tensor, context and pipeline parallelism: there several ranks must get the same input."""


def mentions(modules: Iterable[SourceModule], *names: str) -> bool:
    """Return whether any file uses one of these names: as a name, an attribute, an argument or an import."""
    return any(name in names for module in modules for name in _names(module))


def shares_input(modules: Iterable[SourceModule]) -> bool:
    """Return whether ranks may have to get the same input."""
    return mentions(modules, *SHARED_INPUT)


def _names(module: SourceModule) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]


def calls_of(modules: Sequence[SourceModule], *names: str) -> list[tuple[SourceModule, Call]]:
    """Return the calls of these functions in all files."""
    return [(module, call) for module in modules for call in module.calls_of(*names)]


def class_named(modules: Sequence[SourceModule], name: str) -> tuple[SourceModule, ast.ClassDef] | None:
    """Return the class of this name, and the file that defines it; None: none does."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
    return None


def method(owner: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Return a method that a class defines itself."""
    return next((node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name), None)
