"""What the source saves: the parts of the dicts that it gives to torch.save."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.source.functions import assignments, function_around, loops_around
from instep.check.source.module import SourceModule

_PARTS = {
    "optimizer": re.compile(r"optim|(^|_)opt($|_)", re.IGNORECASE),
    "scheduler": re.compile(r"sched|(^|_)lr($|_)", re.IGNORECASE),
    "scaler": re.compile(r"scaler", re.IGNORECASE),
    "generator": re.compile(r"rng|random|generator", re.IGNORECASE),
    "progress": re.compile(r"epoch|step|iter", re.IGNORECASE),
    "model": re.compile(r"model|net|state_dict|weights|module|encoder|decoder|generator|critic", re.IGNORECASE),
}
_AVERAGE = re.compile(r"(^|[^a-zA-Z])(ema|averaged?|avg|swa|shadow|averager)(_?model|[^a-zA-Z]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class SavedDict:
    """A call of torch.save, and the parts of what it saves."""

    node: ast.Call
    saved: ast.expr
    """The dict."""
    path: ast.expr | None
    holds: frozenset[str]


def saved_dicts(module: SourceModule) -> Iterator[SavedDict]:
    """Yield the calls of torch.save whose object is written out in the same function."""
    for call in module.calls_of("torch.save"):
        saved = call.argument("obj", 0)
        if isinstance(saved, ast.Name):
            values = [value for names, value in assignments(function_around(module, call.node)) if saved.id in names]
            saved = values[0] if len(values) == 1 else None
        if saved is None:
            continue
        holds = _parts(saved)
        if holds:
            yield SavedDict(call.node, saved, call.argument("f", 1), holds)


def scripts_parts(module: SourceModule) -> list[str]:
    """Return what a training of this file has, besides the model: optimizer, scheduler, scaler."""
    parts = []
    names = [call.name for call in module.calls]
    if any(name.startswith("torch.optim.") and "lr_scheduler" not in name for name in names):
        parts.append("optimizer")
    if any("lr_scheduler" in name or name.rpartition(".")[2].endswith(("LR", "LROnPlateau")) for name in names):
        parts.append("scheduler")
    if any(name.endswith("GradScaler") for name in names):
        parts.append("scaler")
    return parts


def lacks_average(module: SourceModule, saved: SavedDict) -> str:
    """Return the averaged copy of the weights that the training updates and a dict does not have; empty: none."""
    for call in module.calls:
        owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
        name = ast.unparse(owner) if isinstance(owner, ast.Name | ast.Attribute) else ""
        is_update = call.last in ("update", "step", "update_parameters", "lerp_") and bool(_AVERAGE.search(name))
        if is_update and any(True for _ in loops_around(module, call.node)) and not has_average(saved.saved):
            return name
    return ""


def has_average(saved: ast.expr) -> bool:
    """Return whether something that is saved has averaged weights, by its names."""
    return bool(_AVERAGE.search(ast.unparse(saved)))


def unread_parts(module: SourceModule) -> Iterator[tuple[SavedDict, str, str]]:
    """Yield states of the training in a dict that the file loads, of which it takes other entries only."""
    read = {
        node.slice.value
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant)
    }
    read |= {
        call.node.args[0].value
        for call in module.calls_of("get", "pop")
        if call.node.args and isinstance(call.node.args[0], ast.Constant)
    }
    if not any(True for _ in module.calls_of("torch.load")):
        return
    for saved in saved_dicts(module):
        if not isinstance(saved.saved, ast.Dict):
            continue
        pairs = zip(saved.saved.keys, saved.saved.values, strict=True)
        entries = {text: value for key, value in pairs if (text := _text(key))}
        models = [key for key, value in entries.items() if _part(key, value) == "model"]
        if not any(key in read for key in models) or "optimizer" not in saved.holds:
            continue
        for key, value in entries.items():
            part = _part(key, value)
            if part in ("optimizer", "scheduler", "scaler") and key not in read and "state_dict" in ast.unparse(value):
                yield saved, key, part


def _parts(saved: ast.expr) -> frozenset[str]:
    if isinstance(saved, ast.Call) and ast.unparse(saved.func).endswith("state_dict"):
        return frozenset(["model"])
    if isinstance(saved, ast.Call) and isinstance(saved.func, ast.Name) and saved.func.id == "dict":
        pairs = [(keyword.arg, keyword.value) for keyword in saved.keywords]
    elif isinstance(saved, ast.Dict):
        pairs = [(_text(key), value) for key, value in zip(saved.keys, saved.values, strict=True)]
    else:
        return frozenset()
    if any(name is None for name, _ in pairs):  # `**more`: unknown
        return frozenset()
    return frozenset(part for name, value in pairs if (part := _part(name or "", value)))


def _part(name: str, value: ast.expr) -> str:
    text = f"{name} {ast.unparse(value)}"
    is_module = text.endswith("generator.state_dict()")  # of a GAN
    for part, pattern in _PARTS.items() if not is_module else ():
        if any(pattern.search(word) for word in re.split(r"[^A-Za-z_0-9]+", text)):
            return part
    return "model" if text.endswith("state_dict()") else ""


def _text(key: ast.expr | None) -> str | None:
    if key is None:
        return None
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
