"""Which layers are sharded over a tensor-parallel group, and how: the plan, before it is applied.

The names of the styles are those of Hugging Face's plans, so a model that has such a plan needs nothing else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from instep.core.errors import TaskError

COLWISE, COLWISE_REP, ROWWISE, HEADS, REPLICATE = "colwise", "colwise_rep", "rowwise", "heads", "replicate"
_SYNONYMS = {
    COLWISE: ("colwise", "local_colwise", "packed_colwise", "local_packed_colwise"),
    COLWISE_REP: ("colwise_rep", "colwise_gather_output"),
    ROWWISE: ("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise", "embedding_rowwise"),
    HEADS: ("heads",),
    REPLICATE: ("replicate", "sequence_parallel"),  # the same result, with more memory for activations
}
"""A Slice looks whole to the code between layers, so several styles mean the same here."""
_STYLES = {name: style for style, names in _SYNONYMS.items() for name in names}
_DESCRIPTIONS = {
    COLWISE: "by columns",
    COLWISE_REP: "by columns, joined after each",
    ROWWISE: "by rows",
    HEADS: "by heads",
    REPLICATE: "whole on every rank",
}

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is sharded."""

    style: str
    why: str = ""
    """Why it has no better style."""
    tied: bool = False
    """Whether another layer has the same weight, so that it can be sharded along one dimension only."""


@dataclass
class TensorPlan:
    """How each layer with weights is sharded, by its path."""

    source: str
    """Where the plan comes from, for messages."""
    layers: dict[str, LayerPlan] = field(default_factory=dict)
    torch_styles: dict[str, Any] = field(default_factory=dict)
    """Layers that get a ParallelStyle of PyTorch's."""
    pairs: list[set[str]] = field(default_factory=list)
    """The kinds of layers between which Slices pass without being gathered."""

    def describe(self, size: int, share: float) -> str:
        """Return the plan in one line; `share` is the fraction of all parameters that is sharded."""
        groups: dict[tuple[str, str], list[str]] = {}
        for path, layer in self.layers.items():
            groups.setdefault((layer.style, layer.why), []).append(path)
        for path, torch_style in self.torch_styles.items():
            groups.setdefault((type(torch_style).__name__, ""), []).append(path)
        descriptions = [
            f"{', '.join(name or 'the model' for name in compact(paths))} {_DESCRIPTIONS.get(style, 'by ' + style)}"
            + (f" ({why})" if why else "")
            for (style, why), paths in groups.items()
        ]
        return (
            f"tensor plan, {self.source}: {share:.0%} of the parameters are shared by tp={size} ranks. "
            + "; ".join(descriptions)
            + ". Everything else is whole on every rank."
        )


def compact(paths: list[str]) -> list[str]:
    """Return `blocks.0–11.out` for paths that differ in one number."""
    numbers: dict[str, list[tuple[int, ...]]] = {}
    for path in paths:
        numbers.setdefault(kind_of(path), []).append(tuple(map(int, _NUMBER.findall(path))))
    return [_fill(kind, tuples) for kind, tuples in numbers.items()]


def _fill(kind: str, numbers: list[tuple[int, ...]]) -> str:
    columns = iter(zip(*numbers, strict=True))

    def span(_: re.Match[str]) -> str:
        values = sorted(set(next(columns)))
        if len(values) == 1:
            return str(values[0])
        if values == list(range(values[0], values[-1] + 1)):
            return f"{values[0]}–{values[-1]}"
        return "{" + ",".join(map(str, values)) + "}"

    return re.sub(r"\*", span, kind)


def kind_of(path: str) -> str:
    """Return a path without its numbers: the same for the same layer of all blocks."""
    return _NUMBER.sub("*", path)


def given_plan(given: Mapping[str, Any], model: nn.Module, source: str, strict: bool) -> TensorPlan:
    """Read a plan: names of styles or PyTorch's ParallelStyles by path, in which `*` stands for any one name.

    `strict`: the plan was written for this model, so a path without a layer and an unknown style are errors.
    """
    plan = TensorPlan(source)
    modules = dict(model.named_modules())
    for pattern, style in given.items():
        wanted = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
        paths = [path for path in modules if wanted.fullmatch(path)]
        if not paths and strict:
            names = compact([path for path in modules if path])
            some = ", ".join(names[:8]) + (" and more" if len(names) > 8 else "")
            raise TaskError(f"tensor_plan: there is no layer {pattern!r} in the model. It has {some}.")
        for path in paths:
            if not isinstance(style, str):
                plan.torch_styles[path] = style
            elif style in _STYLES:
                plan.layers[path] = LayerPlan(_STYLES[style])
            elif strict:
                raise TaskError(
                    f"tensor_plan: {style!r} for {pattern!r} is unknown. Styles are {', '.join(sorted(_STYLES))}, or a "
                    "ParallelStyle of torch.distributed.tensor.parallel."
                )
            else:
                plan.layers[path] = LayerPlan(REPLICATE, f"{style!r} is not known here")
    return plan


def model_plan(model: nn.Module) -> dict[str, Any]:
    """Return the plan of a Hugging Face model: its own, and that of its base model's config; empty: it has none."""
    styles: dict[str, Any] = {}
    prefix = str(getattr(model, "base_model_prefix", ""))
    of_base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if isinstance(of_base, Mapping):
        under = f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""
        styles |= {under + path: style for path, style in of_base.items()}
    own = getattr(model, "_tp_plan", None)
    if isinstance(own, Mapping):
        styles |= own
    return styles
