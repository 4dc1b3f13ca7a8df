"""The weights that a new model starts from: all of them, or, on request, those that fit.

Weights that fit in part are refused unless `--init-partial` asks for them: a renamed layer would otherwise train from
scratch, and nobody would know. What is left out is listed either way.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from instep.checkpoint.weights import load_weights
from instep.core.errors import CheckpointError
from instep.core.plural import plural
from instep.train.frozen_weights import completed
from instep.train.weight_names import with_names_of

_SHOWN = 6
"""Names that are listed of each kind."""


class WeightsFit(NamedTuple):
    """How saved weights fit a model, by name."""

    fitting: tuple[str, ...]
    missing: tuple[str, ...]
    """The model has them, and what was saved has not."""
    extra: tuple[str, ...]
    """Only what was saved has them."""
    other_shapes: tuple[str, ...]
    """Both have them, in different shapes."""

    @classmethod
    def of(cls, own: Mapping[str, Any], saved: Mapping[str, Any]) -> "WeightsFit":
        """Compare two state_dicts; a tied weight is there if it is there under one of its names."""
        both = [name for name in own if name in saved]
        fitting = tuple(name for name in both if _shape(own[name]) == _shape(saved[name]))
        known = {id(own[name]) for name in fitting}
        return cls(
            fitting,
            tuple(name for name in own if name not in saved and id(own[name]) not in known),
            tuple(name for name in saved if name not in own),
            tuple(name for name in both if name not in set(fitting)),
        )

    def describe(self, own: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
        """Return what is left out, by kind and name; empty: nothing."""
        shapes = [f"{name} ({_shape(own[name])}, and {_shape(saved[name])} there)" for name in self.other_shapes]
        kinds = (
            ("of another shape", shapes),
            ("only in the model", self.missing),
            ("only in what was saved", self.extra),
        )
        return "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds if names)


def load_first_weights(model: nn.Module, source: str, is_partial: bool, notice: Callable[[str], None]) -> None:
    """Load the weights that `init_from` names into a new model; `is_partial`: what fits, with a notice of the rest.

    Those that a checkpoint leaves out come from where that run had them from.
    """
    weights = load_weights(Path(source))
    if weights.frozen is not None and (origin := weights.frozen["init_from"]) is not None:
        load_first_weights(model, origin, is_partial or bool(weights.frozen.get("init_partial")), lambda _text: None)
    saved = with_names_of(model, completed(model, weights))
    try:
        model.load_state_dict(saved)
        return
    except RuntimeError as error:
        problem = error
    own = model.state_dict(keep_vars=True)
    fit = WeightsFit.of(own, saved)
    if not fit.fitting:
        raise CheckpointError(
            f"init_from={source}: these weights do not fit the model: none of the {plural(len(saved), 'tensor')} does. "
            f"There: {_listed(list(saved))}. Here: {_listed(list(own))}. Is it another model, or do the names differ?"
        ) from problem
    left_out = fit.describe(own, saved)
    if left_out and not is_partial:
        raise CheckpointError(
            f"init_from={source}: these weights do not fit the model. {left_out}. If that is meant (a new head, say), "
            f"add --init-partial: it loads the {len(fit.fitting)} that fit, and the others start anew."
        ) from problem
    try:
        model.load_state_dict({name: saved[name] for name in fit.fitting}, strict=False)
    except RuntimeError as error:  # of a module that loads its state itself
        raise CheckpointError(f"init_from={source}: these weights do not fit the model: {error}") from error
    if left_out:
        notice(
            f"init_from={source}: {len(fit.fitting)} of the model's {plural(len(own), 'tensor')} loaded. {left_out}."
        )


def _shape(value: Any) -> str:
    """Return a tensor's shape in words; empty for what is no tensor."""
    return "×".join(map(str, value.shape)) or "one number" if isinstance(value, torch.Tensor) else ""


def _listed(names: Sequence[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
