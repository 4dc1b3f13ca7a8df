"""Optuna's samplers and pruners by name: `tpe`, `tpe:multivariate=true`, `median`, `hyperband:max_resource=27`.

All classes of `optuna.samplers` and `optuna.pruners` are known by their names without the last word, in lower case. A
sampler is made anew for each trial, with a seed of its own, and so is a pruner: what they decide depends on the seed,
the trial's number and the history, not on what this process has done before ([Note: A study that can be continued]).
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna

from instep.core.errors import SpecError
from instep.core.nearest import nearest
from instep.tune import population, promotion
from instep.tune.space import Dimension

_ALIASES = {"none": "nop", "brute": "bruteforce", "cma": "cmaes"}
_OF_ONE_SEQUENCE = ("GridSampler", "QMCSampler")
"""Samplers that go through one sequence of points, which their seed decides."""
_FROM_US = {"self", "seed", "search_space", "constraints_func"}
"""Parameters that a search sets itself."""


def sampler_names() -> list[str]:
    """Return the names of all samplers."""
    return sorted(_classes(optuna.samplers, optuna.samplers.BaseSampler, "Sampler"))


def pruner_names() -> list[str]:
    """Return the names of all pruners."""
    return sorted(_classes(optuna.pruners, optuna.pruners.BasePruner, "Pruner"))


def make_sampler(
    text: str, seed: int, number: int, space: Mapping[str, Dimension] | None
) -> optuna.samplers.BaseSampler:
    """Return the sampler of this name for a trial; `space`: the dimensions, unless the Task suggests them itself."""
    cls, options = _read("sampler", text, _classes(optuna.samplers, optuna.samplers.BaseSampler, "Sampler"))
    known = inspect.signature(cls).parameters
    if "seed" in known:
        options["seed"] = seed if cls.__name__ in _OF_ONE_SEQUENCE else seed_of(seed, number)
    if "search_space" in known:
        options["search_space"] = _grid(space)
    sampler = _make("sampler", text, cls, options)
    assert isinstance(sampler, optuna.samplers.BaseSampler)
    return sampler


def make_pruner(text: str) -> optuna.pruners.BasePruner:
    """Return the pruner of this name."""
    classes = _classes(optuna.pruners, optuna.pruners.BasePruner, "Pruner")
    cls, options = _read("pruner", text, classes, others=(promotion.NAME, population.NAME))
    pruner = _make("pruner", text, cls, options)
    assert isinstance(pruner, optuna.pruners.BasePruner)
    return pruner


def seed_of(seed: int, number: int) -> int:
    """Return the seed of a trial's sampler."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4])


def _classes(module: Any, base: type, suffix: str) -> dict[str, type]:
    classes = {name: getattr(module, name) for name in module.__all__}
    return {
        name.removesuffix(suffix).lower(): cls
        for name, cls in classes.items()
        if isinstance(cls, type) and issubclass(cls, base) and not inspect.isabstract(cls)
    }


def _read(what: str, text: str, classes: Mapping[str, type], others: Sequence[str] = ()) -> tuple[type, dict[str, Any]]:
    """Return the class and the options that a text such as `tpe:n_startup_trials=5` names.

    `others` may be chosen as well, and are no classes of Optuna.
    """
    name, _, rest = text.partition(":")
    name = _ALIASES.get(name.lower(), name.lower())
    if name not in classes:
        known = sorted([*classes, *others])
        raise SpecError(f"{what}={text!r} is unknown.{nearest(name, known)} Choose one of {', '.join(known)}.")
    known_options = [p for p in inspect.signature(classes[name]).parameters if p not in _FROM_US]
    options = {}
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if not equals or key not in known_options:
            raise SpecError(f"{what}={text!r}: {name} has no option {key!r}. It has {', '.join(known_options)}.")
        options[key] = _literal(value)
    return classes[name], options


def _make(what: str, text: str, cls: type, options: Mapping[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            return cls(**options)
        except ImportError as error:
            line = str(error).splitlines()[0]
            raise SpecError(f"{what}={text!r} needs a package that is not installed: {line}") from None
        except (TypeError, ValueError) as error:
            raise SpecError(f"{what}={text!r}: {error}") from None


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _grid(space: Mapping[str, Dimension] | None) -> dict[str, list[Any]]:
    """Return all values of each dimension, for a grid."""
    if space is None:
        raise SpecError("sampler=grid needs a fixed space, and this Task has a search_space(). Use bruteforce.")
    for name, dimension in space.items():
        if not math.isfinite(dimension.num_values):
            raise SpecError(
                f"sampler=grid needs a number of values, and {name}={dimension} has infinitely many. Write "
                f"{name}=A,B,C or {name}={dimension}:step=…, or use another sampler."
            )
    return {name: dimension.values() for name, dimension in space.items()}
