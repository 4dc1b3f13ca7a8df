"""The space of a search: which values a Task's fields and a training's options may take. Pure.

`lr=1e-5..1e-1:log` is a range, `layers=2..8` one of whole numbers, `width=64..512:step=64` one of every 64th,
`act=relu,gelu` a choice; a field that is a list itself separates its choices by `|`. The type of the field decides what
a text means, so that a wrong one is refused before anything starts.
"""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instep.core.errors import SpecError
from instep.core.options import options_of
from instep.core.spec import TrainSpec
from instep.train.source import parse_value


@dataclass(frozen=True)
class Range:
    """All numbers between two."""

    name: str
    low: float
    high: float
    is_int: bool = False
    log: bool = False
    step: float | None = None

    @property
    def first(self) -> Any:
        """A value of it."""
        return self.low

    @property
    def num_values(self) -> float:
        """How many values it has; infinity, if it has no steps."""
        if self.is_int or self.step is not None:
            return math.floor((self.high - self.low) / (self.step or 1) + 1e-9) + 1
        return math.inf

    def values(self) -> list[Any]:
        """Return all values of a range with steps."""
        assert math.isfinite(self.num_values)
        return [self.low + number * (self.step or 1) for number in range(int(self.num_values))]

    def contains(self, value: Any) -> bool:
        """Return whether a value lies in the range; steps are not checked."""
        kinds = (int,) if self.is_int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        how = ":log" if self.log else f":step={self.step!r}" if self.step is not None else ""
        return f"{self.low!r}..{self.high!r}{how}"


@dataclass(frozen=True)
class Choice:
    """One of several values; those that Optuna cannot store (lists, paths, enums) as texts."""

    name: str
    choices: tuple[Any, ...]
    separator: str = ","

    @property
    def first(self) -> Any:
        """A value of it."""
        return self.choices[0]

    @property
    def num_values(self) -> float:
        """How many there are."""
        return len(self.choices)

    def values(self) -> list[Any]:
        """Return all of them."""
        return list(self.choices)

    def contains(self, value: Any) -> bool:
        """Return whether a value is one of the choices."""
        return any(value == choice and type(value) is type(choice) for choice in self.choices)

    def __str__(self) -> str:
        return self.separator.join(map(text_of, self.choices))


Dimension = Range | Choice


def read_dimension(name: str, text: str, kind: Any) -> Dimension | None:
    """Return the dimension that a text stands for, by the type of its field; None: it is one value."""
    numbers = _number_types(kind)
    if numbers and ".." in text:
        return _read_range(name, text, is_int=float not in numbers)
    separator = "|" if typing.get_origin(_without_none(kind)) in (list, tuple) else ","
    if separator not in text:
        return None
    items = [item.strip() for item in text.split(separator)]
    if not all(items):
        raise SpecError(f"{name}={text} has an empty choice. Write for instance {name}={separator.join('ab')}.")
    return Choice(name, _distinct(name, [_plain(item, parse_value(name, item, kind)) for item in items]), separator)


def dimension_of(name: str, value: Any, kind: Any) -> Dimension:
    """Return the dimension that a program gives for a field: a text as on the command line, or a list of choices."""
    if isinstance(value, str):
        dimension = read_dimension(name, value, kind)
        if dimension is None:
            raise SpecError(f"{name}={value!r} is one value, so that there is nothing to search. Set it on the Task.")
        return dimension
    if not isinstance(value, Sequence) or not value:
        raise SpecError(
            f"the space of {name} is {value!r}. Give a text, such as '1e-5..1e-1:log', or a list of choices."
        )
    texts = [text_of(item) for item in value]
    for item, text in zip(value, texts, strict=True):
        if parse_value(name, text, kind) != item:
            raise SpecError(f"{name}: {item!r} is not of the type {kind!r} that the field has.")
    separator = "|" if typing.get_origin(_without_none(kind)) in (list, tuple) else ","
    return Choice(name, _distinct(name, list(map(_plain, texts, value))), separator)


def _read_range(name: str, text: str, is_int: bool) -> Range:
    body, _, how = text.partition(":")
    low_text, _, high_text = body.partition("..")
    low, high = (_number(name, text, end, is_int) for end in (low_text, high_text))
    step = None
    if how.startswith("step="):
        step = _number(name, text, how.removeprefix("step="), is_int)
    elif how not in ("", "log"):
        raise SpecError(f"{name}={text}: {how!r} is unknown. Write {body}:log or {body}:step=NUMBER.")
    return _checked(Range(name, low, high, is_int, how == "log", step), text)


def _checked(dimension: Range, text: str) -> Range:
    name, low, high = dimension.name, dimension.low, dimension.high
    if low > high:
        raise SpecError(f"{name}={text} is empty: it ends below its beginning. Write {name}={high!r}..{low!r}.")
    if low == high:
        raise SpecError(f"{name}={text} has one value only. To set it without a search, write {name}={low!r}.")
    if dimension.log and low <= 0:
        raise SpecError(
            f"{name}={text} reaches {low!r}, and a logarithm needs values above 0. Begin above 0, or leave :log out."
        )
    if dimension.step is not None and not 0 < dimension.step <= high - low:
        raise SpecError(f"{name}={text}: no step of {dimension.step!r} fits between {low!r} and {high!r}.")
    return dimension


def _number(name: str, whole: str, text: str, is_int: bool) -> float:
    try:
        value: float = int(text) if is_int else float(text)
    except ValueError:
        kind = "a whole number, which this field holds" if is_int else "a number"
        raise SpecError(f"{name}={whole}: {text!r} is not {kind}.") from None
    if not math.isfinite(value):
        raise SpecError(f"{name}={whole}: {text} is not finite. A range needs two finite ends.")
    return value


def _distinct(name: str, values: list[Any]) -> tuple[Any, ...]:
    for number, value in enumerate(values):
        if value in values[:number]:
            raise SpecError(f"{name}: the choice {text_of(value)} is there twice. Leave one out.")
    return tuple(values)


def _plain(text: str, value: Any) -> Any:
    """Return a value as Optuna can store it."""
    return value if isinstance(value, bool | int | float | str | None) and not isinstance(value, enum.Enum) else text


def text_of(value: Any) -> str:
    """Return the text from which the command line reads a value."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(text_of, value))
    return value.name if isinstance(value, enum.Enum) else str(value)


def field_value(name: str, value: Any, kind: Any) -> Any:
    """Return the value of a field for a parameter of a trial; check it against the field's type."""
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return parse_value(name, text_of(value), kind)
    numbers = _number_types(kind)
    if numbers and float in numbers:
        return float(value)
    return parse_value(name, text_of(value), kind)


def _without_none(kind: Any) -> Any:
    arguments = [a for a in typing.get_args(kind) if a is not type(None)]
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return arguments[0] if is_union and len(arguments) == 1 else kind


def _number_types(kind: Any) -> set[Any]:
    """Return int, float or both, for a field that holds nothing else, or None; an empty set for another field."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = {a for a in typing.get_args(kind) if a is not type(None)} if is_union else {kind}
    return kinds if kinds <= {int, float} else set()


def read_fields(words: Sequence[str], hints: Mapping[str, Any]) -> tuple[list[str], dict[str, Dimension]]:
    """Divide `name=…` words into those that set a field of a Task and those that search it."""
    fixed, space = [], dict[str, Dimension]()
    for word in words:
        name, _, text = word.partition("=")
        dimension = read_dimension(name, text, hints[name]) if name in hints else None
        if dimension is None:
            fixed.append(word)
        elif name in space:
            raise SpecError(f"{name} is searched twice: {name}={space[name]} and {word}. Leave one out.")
        else:
            space[name] = dimension
    return fixed, space


def read_options(texts: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, Dimension]]:
    """Divide the texts of searchable options into values and dimensions; None: the option was not given."""
    fixed, space = dict[str, Any](), dict[str, Dimension]()
    for option in options_of(TrainSpec):
        text = texts.get(option.name)
        if text is None:
            continue
        dimension = read_dimension(option.name, text, option.type)
        if dimension is None:
            fixed[option.name] = parse_value(option.name, text, option.type)
        else:
            space[option.name] = dimension
    return fixed, space
