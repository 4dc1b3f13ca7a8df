"""Read a training script, without running it: what it trains, and with which numbers.

Pure: from the text of a script to its parts as syntax trees. It knows plain loops, DDP, Accelerate, Lightning and the
Hugging Face Trainer by the calls that they are made of; what it does not find is None, and the user's to complete.
"""

from __future__ import annotations

import ast
import re

from instep.cli.moving.frameworks import read_lightning, read_trainer
from instep.cli.moving.loss import loss_parts
from instep.cli.moving.parts import ScriptParts, calls, keyword, name_of
from instep.world.device import ACCELERATORS

OPTIMIZERS = frozenset(
    (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
)
SCHEDULERS = frozenset(
    (
        *("ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR"),
        *("ExponentialLR", "LambdaLR", "LinearLR", "MultiplicativeLR", "MultiStepLR", "OneCycleLR", "PolynomialLR"),
        *("ReduceLROnPlateau", "SequentialLR", "StepLR"),
    )
)
_WRAPPERS = frozenset(("DistributedDataParallel", "DDP", "DataParallel", "FullyShardedDataParallel", "FSDP", "compile"))
_EVAL_NAME = re.compile(r"^(test|val|valid|validation|eval|dev)_?(set|data|dataset|ds)$")
_TRAIN_NAME = re.compile(r"^(train|training)_?(set|data|dataset|ds)$")


def read_script(source: str) -> ScriptParts:
    """Return the parts of a script; raise SyntaxError if it is not Python."""
    parts = ScriptParts(ast.parse(source), source)
    for node in ast.walk(parts.tree):
        if isinstance(node, ast.Assign):
            _note_assignment(parts, node)
        elif isinstance(node, ast.Call):
            _note_call(parts, node)
        elif isinstance(node, ast.ClassDef) and any(name_of(base) == "LightningModule" for base in node.bases):
            parts.lightning = node
    read_lightning(parts)
    _read_data(parts)
    _read_loop(parts)
    read_trainer(parts)
    parts.model = parts.model or _find_model(parts)
    parts.metric = _find_metric(parts)
    return parts


def _note_assignment(parts: ScriptParts, node: ast.Assign) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            parts.assigned.setdefault(target.id, []).append(node.value)
        elif isinstance(target, ast.Tuple):
            entries = node.value.elts if isinstance(node.value, ast.Tuple) else None
            for number, entry in enumerate(target.elts):
                if isinstance(entry, ast.Name):
                    value = entries[number] if entries else ast.Subscript(node.value, ast.Constant(number), ast.Load())
                    parts.assigned.setdefault(entry.id, []).append(value)


def _note_call(parts: ScriptParts, node: ast.Call) -> None:
    name = name_of(node)
    if name in OPTIMIZERS and node.args and parts.optimizer is None:
        parts.optimizer = node
    elif name in SCHEDULERS and node.args and parts.scheduler is None:
        parts.scheduler = node
    elif name == "add_argument" and (default := keyword(node, "default")) is not None:
        flags = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        longest = max(flags, key=len, default="").lstrip("-").replace("-", "_")
        parts.arguments.setdefault(longest, default)
    elif name == "clip_grad_norm_" and len(node.args) > 1:
        parts.options["clip_norm"] = node.args[1]


def _read_data(parts: ScriptParts) -> None:
    """Find the datasets by the loaders that they are given to, or by their names."""
    loaders = list(calls(parts.tree, "DataLoader"))
    train = [call for call in loaders if keyword(call, "shuffle") or keyword(call, "sampler")] or loaders[:1]
    for call in train[:1]:
        parts.train_data = call.args[0] if call.args else keyword(call, "dataset")
        if (size := keyword(call, "batch_size") or _spread(parts, call, "batch_size")) is not None:
            parts.options["batch_size"] = size
    others = [call for call in loaders if call not in train and call.args]
    if others:
        parts.eval_data = others[0].args[0]
    for name in parts.assigned:
        if parts.eval_data is None and _EVAL_NAME.match(name):
            parts.eval_data = ast.Name(name, ast.Load())
        if parts.train_data is None and _TRAIN_NAME.match(name):
            parts.train_data = ast.Name(name, ast.Load())


def _spread(parts: ScriptParts, call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword that a call gets by `**settings`, where settings is a dict in the script."""
    for entry in call.keywords:
        values = parts.assigned.get(name_of(entry.value), []) if entry.arg is None else []
        for settings in values:
            for key, value in (
                zip(settings.keys, settings.values, strict=True) if isinstance(settings, ast.Dict) else ()
            ):
                if isinstance(key, ast.Constant) and key.value == name:
                    return value
    return None


def _read_loop(parts: ScriptParts) -> None:
    """Find the loop over batches that calls backward, and the loop over epochs around it."""
    loops = [node for node in ast.walk(parts.tree) if isinstance(node, ast.For)]
    functions = [node for node in ast.walk(parts.tree) if isinstance(node, ast.FunctionDef)]
    steps = {node.name for node in functions if any(calls(node, "backward"))}
    # ast.walk goes from the outside to the inside.
    batches = next((node for node in reversed(loops) if any(calls(node, "backward"))), None)
    if batches is None or _is_range(batches):  # steps over the whole data, not epochs
        return
    for loop in loops:
        if _is_range(loop) and any(calls(loop, "backward", *steps)):
            parts.options.setdefault("epochs", _times(loop.iter))
    target = batches.target
    if isinstance(batches.iter, ast.Call) and name_of(batches.iter) == "enumerate" and isinstance(target, ast.Tuple):
        target = target.elts[1]
    call = next(calls(batches, "backward"))
    value = call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None
    if value is not None:
        parts.loss = loss_parts(target, batches.body, value)
    scheduler = next((name for name, values in parts.assigned.items() if parts.scheduler in values), "")
    if scheduler and any(ast.unparse(call) == f"{scheduler}.step()" for call in calls(batches, "step")):
        parts.scheduler_interval = "step"


def _is_range(loop: ast.For) -> bool:
    return isinstance(loop.iter, ast.Call) and name_of(loop.iter) in ("range", "trange") and bool(loop.iter.args)


def _times(call: ast.expr) -> ast.expr:
    """Return how often `range(…)` runs, as an expression; `range(1, N + 1)` runs N times."""
    assert isinstance(call, ast.Call)
    last = call.args[min(1, len(call.args) - 1)]
    if len(call.args) > 1 and isinstance(last, ast.BinOp) and ast.unparse(last).endswith(" + 1"):
        return last.left if ast.unparse(call.args[0]) == "1" else last
    return last


def _find_model(parts: ScriptParts) -> ast.expr | None:
    """Return the expression that makes the model whose parameters the optimizer gets."""
    modules = {node.name for node in parts.tree.body if isinstance(node, ast.ClassDef)}
    first = parts.optimizer.args[0] if parts.optimizer is not None else None
    names = [node.id for node in ast.walk(first) if isinstance(node, ast.Name)] if first is not None else []
    for name in [*names, "model", "net"]:
        for value in parts.assigned.get(name, ()):
            made = unwrapped(value)
            if isinstance(made, ast.Call) and (name_of(made) in modules or not _is_preparation(made)):
                return made
    return None


def _is_preparation(call: ast.Call) -> bool:
    return name_of(call) in ("prepare", "prepare_model", "setup")


def unwrapped(value: ast.expr) -> ast.expr:
    """Return what a model is before it is wrapped (DDP, compile) and moved (to)."""
    while isinstance(value, ast.Call):
        if name_of(value) in _WRAPPERS and value.args:
            value = value.args[0]
        elif isinstance(value.func, ast.Attribute) and value.func.attr in ("to", "cpu", "float", *ACCELERATORS):
            value = value.func.value
        else:
            break
    return value


def _find_metric(parts: ScriptParts) -> ast.Compare | None:
    for node in ast.walk(parts.tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            sides = [node.left, *node.comparators]
            sides += [value for side in sides for value in parts.assigned.get(name_of(side), ())]
            if any("argmax" in ast.unparse(side) for side in sides):
                return node
    return None
