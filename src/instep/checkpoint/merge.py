"""Put the skeletons of several ranks together: each stage of a pipeline knows its own names. Pure.

Dicts are joined, and of two values for one key the first rank's is taken. Lists of names are joined; other lists (an
optimizer's groups) are merged item by item.
"""

from __future__ import annotations

import json
from typing import Any


def merge(first: Any, second: Any) -> Any:
    """Add what only the second skeleton has to the first ([Note: State trees])."""
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() == {"$dict"} == second.keys():
            return {"$dict": _merge_pairs(first["$dict"], second["$dict"])}
        if _is_mark(first) or _is_mark(second):
            return first
        joined = {**first, **{key: value for key, value in second.items() if key not in first}}
        return {key: merge(value, second[key]) if key in second else value for key, value in joined.items()}
    if isinstance(first, list) and isinstance(second, list):
        if all(isinstance(item, str) for item in [*first, *second]):
            return [*first, *(name for name in second if name not in set(first))]
        both = [merge(a, b) for a, b in zip(first, second, strict=False)]
        return [*both, *first[len(both) :], *second[len(both) :]]
    return first


def _merge_pairs(first: list[Any], second: list[Any]) -> list[Any]:
    """Merge dicts whose keys are no strings, which are written as pairs."""
    theirs = {json.dumps(key): value for key, value in second}
    known = {json.dumps(key) for key, _ in first}
    mine = [[k, merge(v, theirs[json.dumps(k)]) if json.dumps(k) in theirs else v] for k, v in first]
    return [*mine, *([key, value] for key, value in second if json.dumps(key) not in known)]


def _is_mark(node: dict[str, Any]) -> bool:
    """Tell whether a dict stands for something that JSON has no word for."""
    return len(node) == 1 and next(iter(node)) in ("$tensor", "$float", "$tuple")
