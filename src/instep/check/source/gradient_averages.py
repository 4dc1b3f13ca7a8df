"""Where the source averages gradients over ranks by hand: in which order with clipping, and which it leaves out."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import calls_below, calls_in, function_around
from instep.check.source.module import Call, SourceModule

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")


def averages_of_gradients(module: SourceModule) -> list[Call]:
    """Return the collectives of this file that are given gradients."""
    return [
        call
        for call in module.calls
        if is_collective(call) and "reduce" in call.last and ".grad" in " ".join(map(ast.unparse, call.node.args))
    ]


def clipped_before_averaging(module: SourceModule) -> Iterator[tuple[Call, Call]]:
    """Yield calls that clip gradients before a later statement of the same block averages them over ranks."""
    averages = {call.node for call in averages_of_gradients(module)}
    if not averages:
        return
    for clip in module.calls_of(*_CLIPS):
        scope = function_around(module, clip.node)
        for call in calls_in(module, scope):
            if call.node.lineno <= clip.node.lineno:
                continue
            if any(inner.last == "backward" for inner in calls_below(module, call.node, 0)):
                break
            if call.node in averages or any(inner.node in averages for inner in _inside(module, call)):
                yield clip, call
                break


def _inside(module: SourceModule, call: Call) -> Iterator[Call]:
    if call.last not in ("step", "backward"):
        yield from calls_below(module, call.node, 2)
