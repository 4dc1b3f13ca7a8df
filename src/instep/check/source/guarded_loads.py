"""Where one rank alone loads the state of an optimizer, a schedule or a GradScaler: DDP sends it to nobody."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import assignments, calls_in, function_around
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import guard_of_callers

_OF_TRAINING = re.compile(r"optim|^opt$|_opt$|^opt_|sched|scaler", re.IGNORECASE)
_MADE = re.compile(r"^torch\.optim\.|lr_scheduler|GradScaler|get_\w*schedule|LambdaLR")
_SENT = re.compile(r"optim|\bopt\b|state|ckpt|checkpoint|payload|sched", re.IGNORECASE)
_OF_OPTIMIZER = re.compile(r"optim|\bopt\b|sched|scaler|\bload\(", re.IGNORECASE)
_SENDS = ("broadcast", "broadcast_object_list", "scatter_object_list", "all_gather_object", "broadcast_optimizer_state")


def loads_by_one_rank(module: SourceModule) -> Iterator[Call]:
    """Yield loads of a state of the training that only the first rank reaches, if all ranks train."""
    if not _all_train(module) or any(_sends(module, call) for call in module.calls):
        return
    loads = [call for call in module.calls_of("load_state_dict") if _is_of_training(module, call)]
    guarded = [call for call in loads if (guard := guard_of_callers(module, call.node)) is not None and guard.is_main]
    elsewhere = {_owner(call) for call in loads if call not in guarded}
    for call in guarded:
        if _owner(call) not in elsewhere:
            yield call


def _owner(call: Call) -> str:
    owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
    if isinstance(owner, ast.Attribute):
        return owner.attr
    return owner.id if isinstance(owner, ast.Name) else ""


def _is_of_training(module: SourceModule, call: Call) -> bool:
    name = _owner(call)
    if not name:
        return False
    made = [value for names, value in assignments(module.tree) if name in names and isinstance(value, ast.Call)]
    return bool(_OF_TRAINING.search(name)) or any(_MADE.search(module.call_of[value].name) for value in made)


def _all_train(module: SourceModule) -> bool:
    backwards = list(module.calls_of("backward", "manual_backward"))
    return bool(backwards) and all(guard_of_callers(module, call.node) is None for call in backwards)


def _sends(module: SourceModule, call: Call) -> bool:
    """Return whether a collective may bring the loaded state to the other ranks."""
    if call.last not in _SENDS or not (is_collective(call) or "state" in call.last):
        return False
    scope = function_around(module, call.node)
    given = " ".join(ast.unparse(argument) for argument in call.node.args[:1])
    loops = [outer for outer in module.around(call.node) if isinstance(outer, ast.For)]
    text = " ".join([given, *(ast.unparse(loop.iter) for loop in loops)])
    values = [ast.unparse(value) for names, value in assignments(scope) if any(name in given for name in names)]
    loaded = [inner for inner in calls_in(module, scope) if inner.last == "load"]
    is_made_of_it = any(_OF_OPTIMIZER.search(value) for value in values)
    return bool(_SENT.search(text)) or is_made_of_it or (bool(loaded) and call.last.endswith("object_list"))
