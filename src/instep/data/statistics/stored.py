"""What `preprocess()` returned, as plain values: for checkpoints, and for a JSON file beside exported weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from instep.core.errors import DataError, TaskError
from instep.core.fitted_file import FITTED_FILE
from instep.data.statistics.estimator import Estimator
from instep.data.statistics.images import ImageNormalizer
from instep.data.statistics.scalers import MinMaxScaler, RobustScaler, StandardScaler
from instep.data.statistics.vocabulary import Vocabulary

ESTIMATORS: dict[str, type[Estimator]] = {
    cls.__name__: cls for cls in (ImageNormalizer, MinMaxScaler, RobustScaler, StandardScaler, Vocabulary)
}


def to_plain(fitted: Mapping[str, Any]) -> dict[str, Any]:
    """Return fitted things by name as values that JSON can hold; raise TaskError for what it cannot."""
    return {name: _to_plain(name, thing) for name, thing in fitted.items()}


def from_plain(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `to_plain` made plain values of."""
    return {name: _from_plain(name, entry) for name, entry in plain.items()}


def load_fitted(path: str | Path) -> dict[str, Any]:
    """Load what a Task's `preprocess()` returned, by name, from a run directory, an export's folder or a file."""
    path = Path(path)
    known = (path, path / FITTED_FILE, path / "files" / FITTED_FILE)
    file = next((each for each in known if each.is_file()), None)
    if file is None:
        raise DataError(f"{path} holds no {FITTED_FILE}. Give a run or an export of a Task that has preprocess().")
    try:
        return from_plain(json.loads(file.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} does not hold what preprocess() returned: {error!r}.") from error


def _to_plain(name: str, thing: Any) -> dict[str, Any]:
    if isinstance(thing, Estimator) and type(thing).__name__ in ESTIMATORS:
        if not thing.is_fitted:
            raise TaskError(
                f"preprocess()[{name!r}] is a {type(thing).__name__} that is not fitted. Call its fit(data)."
            )
        return {"kind": type(thing).__name__, "state": thing.state_dict()}
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        is_tensor = isinstance(thing, torch.Tensor)
        array = thing.detach().cpu().numpy() if isinstance(thing, torch.Tensor) else thing
        if array.dtype.kind in "biuf":
            kind = "tensor" if is_tensor else "array"
            return {
                "kind": kind,
                "dtype": array.dtype.name,
                "shape": list(array.shape),
                "values": array.ravel().tolist(),
            }
    try:
        return {"kind": "value", "value": json.loads(json.dumps(thing))}
    except (TypeError, ValueError):
        raise TaskError(
            f"preprocess()[{name!r}] is a {type(thing).__name__}, which a checkpoint cannot hold. Return scalers and "
            "vocabularies of instep.data, tensors, arrays, numbers, texts, and lists and dicts of numbers and texts."
        ) from None


def _from_plain(name: str, entry: Mapping[str, Any]) -> Any:
    kind = entry["kind"]
    if kind == "value":
        return entry["value"]
    if kind in ("tensor", "array"):
        array = np.array(entry["values"], entry["dtype"]).reshape(entry["shape"])
        return torch.from_numpy(array) if kind == "tensor" else array
    if kind not in ESTIMATORS:
        raise DataError(f"{name} is a {kind}, which this version of instep does not know.")
    thing = ESTIMATORS[kind]()
    thing.load_state_dict(entry["state"])
    return thing
