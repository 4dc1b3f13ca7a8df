"""Names of weights that another program saved, or a model of the same family: a base model, or one with another head.

Hugging Face's models with a head hold the base model under an attribute that `base_model_prefix` names: a BertModel's
`encoder.layer.0…` is `bert.encoder.layer.0…` in a classifier. `from_pretrained` loads one into the other, and so does
`init_from`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from torch import nn

Value = TypeVar("Value")


def with_names_of(model: nn.Module, weights: Mapping[str, Value]) -> dict[str, Value]:
    """Return weights under the names that a model has for them, where only its base model's prefix differs."""
    prefix = getattr(model, "base_model_prefix", "")
    if not isinstance(prefix, str) or not prefix:
        return dict(weights)
    return rename(weights, model.state_dict().keys(), f"{prefix}.")


def rename(weights: Mapping[str, Value], wanted: Collection[str], prefix: str) -> dict[str, Value]:
    """Return weights with the prefix added or removed, for the names that `wanted` has only so."""
    names = {name: name for name in weights}
    if not any(name.startswith(prefix) for name in weights):
        names |= {name: prefix + name for name in weights if name not in wanted and prefix + name in wanted}
    elif not any(name.startswith(prefix) for name in wanted):
        bare = {name: name.removeprefix(prefix) for name in weights if name.startswith(prefix)}
        names |= {name: short for name, short in bare.items() if short in wanted and short not in weights}
    return {names[name]: value for name, value in weights.items()}
