"""Which layers a team of ranks shares, and how: in words, before anything is done.

The words are those of Hugging Face's plans, so that a model that brings one needs nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from instep.core.errors import TaskError

COLUMNS, WHOLE_COLUMNS, ROWS, HEADS, REPLICATE = "colwise", "colwise_rep", "rowwise", "heads", "replicate"
_WORDS = {
    "colwise": COLUMNS,
    "local_colwise": COLUMNS,
    "packed_colwise": COLUMNS,
    "local_packed_colwise": COLUMNS,
    "colwise_rep": WHOLE_COLUMNS,
    "colwise_gather_output": WHOLE_COLUMNS,
    "rowwise": ROWS,
    "rowwise_rep": ROWS,
    "rowwise_split_input": ROWS,
    "local_rowwise": ROWS,
    "embedding_rowwise": ROWS,
    "heads": HEADS,
    "replicate": REPLICATE,
    "sequence_parallel": REPLICATE,  # the same numbers, with more memory for activations
}
"""What each word means here. Tensors look whole to the code between layers, so several of them say the same."""
_IN_WORDS = {
    COLUMNS: "by columns",
    WHOLE_COLUMNS: "by columns, joined after each",
    ROWS: "by rows",
    HEADS: "by heads",
    REPLICATE: "whole on every rank",
}


@dataclass(frozen=True)
class LayerPlan:
    """What is done with one layer."""

    word: str
    why: str = ""
    """Why nothing better could be done."""
    tied: bool = False
    """Whether its weight is another layer's, too, so that it can be cut one way only."""


@dataclass
class TensorPlan:
    """What is done with each layer that has weights to share, by its path."""

    source: str
    """Where it comes from, in words."""
    layers: dict[str, LayerPlan] = field(default_factory=dict)
    styles: dict[str, Any] = field(default_factory=dict)
    """Layers that get a ParallelStyle of PyTorch's."""
    pairs: list[set[str]] = field(default_factory=list)
    """The kinds of layers between which parts go as they are."""

    def describe(self, size: int, share: float) -> str:
        """Say it in one line; `share` is the part of all parameters that is split."""
        groups: dict[tuple[str, str], list[str]] = {}
        for path, layer in self.layers.items():
            groups.setdefault((layer.word, layer.why), []).append(path)
        for path, style in self.styles.items():
            groups.setdefault((type(style).__name__, ""), []).append(path)
        told = [
            f"{', '.join(compact(paths))} {_IN_WORDS.get(word, 'by ' + word)}" + (f" ({why})" if why else "")
            for (word, why), paths in groups.items()
        ]
        return (
            f"tensor plan, {self.source}: {share:.0%} of the parameters are shared by tp={size} ranks. "
            + "; ".join(told)
            + ". Everything else is whole on every rank."
        )


def compact(paths: list[str]) -> list[str]:
    """Write `blocks.0–11.out` for paths that differ in one number."""
    numbers: dict[str, list[tuple[int, ...]]] = {}
    for path in paths:
        kind = kind_of(path)
        numbers.setdefault(kind, []).append(tuple(map(int, re.findall(r"(?<![^.])\d+(?![^.])", path))))
    return [_fill(kind, found) for kind, found in numbers.items()]


def _fill(kind: str, found: list[tuple[int, ...]]) -> str:
    columns = iter(zip(*found, strict=True))

    def span(_: re.Match[str]) -> str:
        values = sorted(set(next(columns)))
        if len(values) == 1:
            return str(values[0])
        if values == list(range(values[0], values[-1] + 1)):
            return f"{values[0]}–{values[-1]}"
        return "{" + ",".join(map(str, values)) + "}"

    return re.sub(r"\*", span, kind)


def kind_of(path: str) -> str:
    """A path without its numbers: the same for the same layer of all blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def given_plan(given: Mapping[str, Any], model: nn.Module, source: str, strict: bool) -> TensorPlan:
    """Read a plan: words or PyTorch's ParallelStyles by path, in which `*` stands for any one name.

    `strict`: whoever wrote it meant this model, so that a path that is nowhere and an unknown word are errors.
    """
    plan = TensorPlan(source)
    modules = dict(model.named_modules())
    for pattern, style in given.items():
        wanted = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
        paths = [path for path in modules if wanted.fullmatch(path)]
        if not paths and strict:
            raise TaskError(f"tensor_plan: there is no layer {pattern!r} in the model. It has {_some(modules)}.")
        for path in paths:
            if not isinstance(style, str):
                plan.styles[path] = style
            elif style in _WORDS:
                plan.layers[path] = LayerPlan(_WORDS[style])
            elif strict:
                raise TaskError(
                    f"tensor_plan: {style!r} for {pattern!r} is unknown. Words are {', '.join(sorted(_WORDS))}; a "
                    "ParallelStyle of torch.distributed.tensor.parallel will do, too."
                )
            else:
                plan.layers[path] = LayerPlan(REPLICATE, f"{style!r} is not known here")
    return plan


def brought_plan(model: nn.Module) -> dict[str, Any]:
    """Find the plan that a Hugging Face model brings: its own, and that of its base model's config."""
    found: dict[str, Any] = {}
    prefix = str(getattr(model, "base_model_prefix", ""))
    of_base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if isinstance(of_base, Mapping):
        under = f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""
        found |= {under + path: word for path, word in of_base.items()}
    own = getattr(model, "_tp_plan", None)
    if isinstance(own, Mapping):
        found |= own
    return found


def _some(modules: Mapping[str, Any]) -> str:
    names = compact([path for path in modules if path])
    return ", ".join(names[:8]) + (" and more" if len(names) > 8 else "")
