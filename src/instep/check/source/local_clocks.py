"""Where a rank's own clock, or a signal that it got, decides about the training: not at the same step on all ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.source.functions import Function, calls_in, names_in
from instep.check.source.local_decisions import decisions, tests_of
from instep.check.source.local_metrics import DEPTH, Walk
from instep.check.source.module import Call, SourceModule

_CLOCKS = frozenset(
    (
        *("time.time", "time.monotonic", "time.perf_counter", "time.process_time", "time.time_ns", "time.monotonic_ns"),
        *("time.perf_counter_ns", "timeit.default_timer", "datetime.now", "datetime.utcnow", "datetime.datetime.now"),
        *("datetime.datetime.utcnow", "datetime.datetime.today", "psutil.virtual_memory", "torch.cuda.mem_get_info"),
        *("torch.cuda.memory_allocated", "torch.cuda.memory_reserved", "torch.cuda.max_memory_allocated"),
    )
)
Handler = Function | ast.Lambda
_REGISTERS = ("signal.signal", "add_signal_handler", "threading.Timer", "Timer")
"""What calls a function when a signal arrives, or later, in this process."""


@dataclass(frozen=True)
class ClockDecision:
    """A condition in a training loop on something that only this process knows."""

    node: ast.If | ast.While
    origin: str
    """The call that reads the clock, or the handler of the signal, with its line."""
    stops: bool
    """Whether the loop is left; otherwise, collectives follow."""


def clock_decisions(module: SourceModule) -> Iterator[ClockDecision]:
    """Yield where a training loop is left, or collectives are issued, by a clock or signal of one process.

    One for each clock: what follows from the same one, in callers, is the same mistake.
    """
    handlers = _handlers(module)
    if not handlers and not any(_is_clock(call) for call in module.calls):
        return
    reported: set[str] = set()
    for node, stops in sorted(decisions(module), key=lambda item: (not _reads_clock(module, item[0]), item[0].lineno)):
        origins = (next(_ClockWalk(module, handlers).leaves(test, "", DEPTH), "") for test in tests_of(module, node))
        origin = next((one for one in origins if one), "")
        if origin and origin not in reported:
            reported.add(origin)
            yield ClockDecision(node, origin, stops)


def _reads_clock(module: SourceModule, node: ast.If | ast.While) -> bool:
    return any(_is_clock(call) for call in calls_in(module, node.test))


class _ClockWalk(Walk):
    """A walk back to clocks, and to what handlers of signals set."""

    def __init__(self, module: SourceModule, handlers: list[Handler]) -> None:
        super().__init__(module)
        self._handlers = handlers

    def origins(self, nodes: list[ast.AST]) -> Iterator[str]:
        """Yield the calls of a clock in an expression, and the handlers that set what it mentions."""
        for node in nodes:
            if isinstance(node, ast.Call) and _is_clock(self.module.call_of[node]):
                yield f"`{ast.unparse(node)}` (line {node.lineno})"
        mentioned = {_last(node) for node in nodes if isinstance(node, ast.expr)} - {""}
        for handler in self._handlers:
            if _set_by(handler) & mentioned:
                name = handler.name if isinstance(handler, Function) else "a lambda"
                yield f"`{name}` (line {handler.lineno}), which a signal or timer calls"

    def measured(self, name: str, value: ast.expr | None) -> str:  # noqa: ARG002
        """Return nothing: a metric is no clock."""
        return ""


def _is_clock(call: Call) -> bool:
    return call.name in _CLOCKS


def _handlers(module: SourceModule) -> list[Handler]:
    """Return the functions of this file that a signal or a timer calls."""
    given = [
        argument
        for call in module.calls
        if call.name in _REGISTERS or call.last in ("add_signal_handler", "Timer")
        for argument in [*call.node.args, *(item.value for item in call.node.keywords)]
    ]
    names = {inner for argument in given if not isinstance(argument, ast.Lambda) for inner in names_in(argument)}
    lambdas = [argument for argument in given if isinstance(argument, ast.Lambda)]
    return [*lambdas, *(function for name in names for function in module.functions.get(name, []))]


def _set_by(handler: Handler) -> set[str]:
    """Return what a handler sets for others to read: a global, an attribute, an element, an Event."""
    outside = {name for node in ast.walk(handler) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    names: set[str] = set()
    for node in ast.walk(handler):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("set", "append")
        ):
            names |= {_last(node.func.value)}
        for target in targets:
            is_outside = isinstance(target, ast.Attribute | ast.Subscript)
            name = _last(target.value if isinstance(target, ast.Subscript) else target)
            names |= {name} if is_outside or name in outside else set()
    return names - {""}


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
