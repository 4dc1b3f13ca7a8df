"""An option of a command, declared in one place: the field of a spec.

The field states the option's name, type, default, help text and scope. Commands, cluster jobs and the comparison of
nodes ask the field; none of them keeps a list of names.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from instep.core.errors import SpecError

TRAINING = "Training"
PROCESSES = "Processes and strategy"
NUMBERS = "Numbers"
SAVING = "Run directory and checkpoints"
FAILURES = "Failures"
NODES = "Several nodes"
OUTPUT = "Output and help"
GROUPS = (TRAINING, PROCESSES, NUMBERS, SAVING, FAILURES, NODES, OUTPUT)
"""The headings of the help text, in order."""


class OptionScope(Enum):
    """What an option decides: who may set it, and whether it may change when a run continues."""

    RECIPE = "recipe"
    """The trajectory depends on it. A run cannot be continued with another value."""
    OPERATIONAL = "operational"
    """It may change when a run continues."""
    NODE = "node"
    """Where the processes run and how nodes meet. On a cluster, the submitted job sets it."""
    OUTPUT = "output"
    """What this command prints and which directory it writes to. It may change when a run continues."""


@dataclass(frozen=True)
class Option:
    """What a field of a spec declares about itself."""

    name: str
    type: Any
    default: Any
    group: str
    help: str
    scope: OptionScope
    flags: tuple[str, ...]
    metavar: str | None
    choices: tuple[str, ...]
    """The allowed words; of a `Literal` field they follow from its type."""
    at_least: int | None
    """The smallest whole number that is allowed."""
    per_node: bool
    """Whether the nodes of one job may have different values."""
    in_verify: bool
    """Whether `instep verify` has this option."""
    in_tune: bool
    """Whether what comes out depends on it, so that `instep tune` may search it."""
    in_evaluate: bool
    """Whether `instep evaluate` and `instep predict` have it, in place of the run's own value."""
    alone: str | None
    """The value that the flag has when no value follows it; None: a value must follow."""
    pattern: str
    """With `alone`: what a value looks like. Anything else that follows the flag is another argument."""

    @property
    def flag(self) -> str:
        """The last spelling, the one that messages name."""
        return self.flags[-1].partition("/")[0]

    @property
    def is_searchable(self) -> bool:
        """Whether `instep tune` takes a range or choices for it: if it is a number or a word."""
        kinds = set(get_args(self.type)) if get_origin(self.type) in (Union, UnionType) else {self.type}
        return self.in_tune and (bool(self.choices) or kinds <= {int, float, type(None)})

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that set this option."""
        if isinstance(value, bool):
            on, _, off = self.flags[-1].partition("/")
            return [on if value else off]
        return [self.flag, str(value)]

    def check(self, value: Any) -> None:
        """Raise SpecError for a value that is not one of the choices, or is too small."""
        if self.choices and value not in self.choices:
            raise SpecError(f"{self.name}={value!r} is unknown. Choose one of {', '.join(self.choices)}.")
        if self.at_least is not None and (value is not None or type(None) not in get_args(self.type)):
            check_at_least(self.name, value, self.at_least)


def _option(
    scope: OptionScope,
    default: Any,
    group: str,
    help: str,
    *flags: str,
    metavar: str | None = None,
    choices: Iterable[str] = (),
    at_least: int | None = None,
    per_node: bool | None = None,
    in_verify: bool | None = None,
    in_tune: bool | None = None,
    in_evaluate: bool = False,
    alone: str | None = None,
    pattern: str = "",
) -> Any:
    """Declare a field of a spec as an option. `flags` are needed only where they do not follow from the name.

    Unless stated otherwise, the nodes of a job must agree on recipe and operational options, `instep verify` has all
    recipe options, and `instep tune` may search those.
    """
    per_node = scope in (OptionScope.NODE, OptionScope.OUTPUT) if per_node is None else per_node
    in_verify = scope is OptionScope.RECIPE if in_verify is None else in_verify
    in_tune = scope is OptionScope.RECIPE if in_tune is None else in_tune
    rest = (per_node, in_verify, in_tune, in_evaluate, alone, pattern)
    declared = Option("", None, default, group, help, scope, flags, metavar, tuple(choices), at_least, *rest)
    return dataclasses.field(default=default, metadata={"option": declared})


recipe_option = partial(_option, OptionScope.RECIPE)
operational_option = partial(_option, OptionScope.OPERATIONAL)
node_option = partial(_option, OptionScope.NODE)
output_option = partial(_option, OptionScope.OUTPUT)


def options_of(spec: type) -> tuple[Option, ...]:
    """Return the options of a spec class, in the order of its fields."""
    return _options_of(spec)


@cache  # behind a function of its own: mypy does not accept the class of a frozen dataclass as hashable
def _options_of(spec: type) -> tuple[Option, ...]:
    types = get_type_hints(spec)
    return tuple(
        _complete(field.metadata["option"], field.name, types[field.name]) for field in dataclasses.fields(spec)
    )


def _complete(declared: Option, name: str, type: Any) -> Option:
    """Add what follows from the name and type of the field."""
    words = name.replace("_", "-")
    flag = f"--{words}/--no-{words}" if bool in (type, *get_args(type)) else f"--{words}"
    choices = get_args(type) if get_origin(type) is Literal else declared.choices
    kind = Literal[choices] if choices else type
    return dataclasses.replace(declared, name=name, type=kind, flags=declared.flags or (flag,), choices=choices)


def check_at_least(name: str, value: Any, least: int) -> None:
    """Raise SpecError unless a value is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{name}={value!r} is not a whole number.")
    if value < least:
        raise SpecError(f"{name}={value} is too small: it must be at least {least}.")
