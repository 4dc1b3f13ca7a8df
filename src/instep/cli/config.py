"""`--config FILE`: options and Task fields from TOML, YAML or JSON; `--print-config`: the resolved ones, as TOML.

    epochs = 5                  an option of `train`, by its name
    [task]
    lr = 3e-4                   a field of the Task

A run's spec.json is a config, too: what it says about the training, not where and how it ran.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.core.errors import SpecError
from instep.core.nearest import nearest
from instep.core.options import GROUPS, Option, OptionScope, options_of
from instep.core.spec import TrainSpec

if TYPE_CHECKING:
    from instep.train.task import Task

TASK_TABLE = "task"
_RIVALS = (("epochs", "steps"), ("strategy", "mesh"))
"""Options that say the same in two ways."""
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_FOUND = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a table", list: "a list"}


class Assignment(str):
    """`name=value` for a field of a Task, as on the command line, and where it was written."""

    origin: str

    def __new__(cls, text: str, origin: str) -> Assignment:
        """Make one from `name=value` and FILE:LINE."""
        self = super().__new__(cls, text)
        self.origin = origin
        return self


@dataclass(frozen=True)
class Config:
    """What config files say: values of options, and assignments to the Task's fields."""

    options: Mapping[str, Any]
    assignments: tuple[Assignment, ...]


def read_configs(paths: Iterable[str]) -> Config:
    """Read config files; where several set the same, the last one counts."""
    options: dict[str, Any] = {}
    assignments: list[Assignment] = []
    for path in paths:
        config = _read_config(Path(path))
        options = without_rivals(options, config.options) | dict(config.options)
        assignments += config.assignments
    return Config(options, tuple(assignments))


def without_rivals(options: Mapping[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """Return options without those that a later file or the command line replaces by another: epochs by steps."""
    replaced = {pair[1 - pair.index(name)] for name in given for pair in _RIVALS if name in pair}
    return {name: value for name, value in options.items() if name not in replaced}


def _read_config(path: Path) -> Config:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SpecError(f"config={path} cannot be read: {reason}.") from None
    if path.suffix.lower() not in _PARSERS:
        raise SpecError(f"config={path} is none of {', '.join(_PARSERS)}. Rename it to what it is.")
    values = _PARSERS[path.suffix.lower()](text, path)
    if not isinstance(values, dict):
        raise SpecError(f"{path} holds {_kind_of(values)}, and a config is a table of options, with a table [task].")
    values = {str(key): value for key, value in values.items()}
    if {"recipe", "spec", TASK_TABLE} <= values.keys():
        values = _of_run(values)
    fields = values.pop(TASK_TABLE, {})
    if not isinstance(fields, dict):
        where = _line_of(text, path, TASK_TABLE)
        raise SpecError(f"{where}: task is {_kind_of(fields)}, and must be a table of the Task's fields.")
    options = dict(_option_value(key, value, text, path) for key, value in values.items() if value is not None)
    after = text[: text.find(TASK_TABLE)].count("\n")
    assignments = [
        Assignment(f"{name}={_text(value)}", _line_of(text, path, str(name), after)) for name, value in fields.items()
    ]
    return Config(options, tuple(assignments))


def _of_run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's spec.json as a config: without where it ran, and what its command printed."""
    elsewhere = {o.name for o in options_of(TrainSpec) if o.scope in (OptionScope.NODE, OptionScope.OUTPUT)}
    options = {name: value for name, value in spec["spec"].items() if name not in elsewhere}
    return options | {TASK_TABLE: {name: _unplain(value) for name, value in spec[TASK_TABLE]["fields"].items()}}


def _unplain(value: Any) -> Any:
    """Return a field's value of spec.json, where paths and enums are as Python shows them, as text to parse."""
    if not isinstance(value, str):
        return value
    shown = re.fullmatch(r"\w*Path\('(.*)'\)|<\w+\.(\w+): .*>", value)
    return value if shown is None else shown[1] if shown[1] is not None else shown[2]


def _option_value(key: str, value: Any, text: str, path: Path) -> tuple[str, Any]:
    name = key.replace("-", "_")
    known = {option.name: option for option in options_of(TrainSpec)}
    if name not in known:
        raise SpecError(
            f"{_line_of(text, path, key)}: there is no option {key}.{nearest(name, known)} Fields of the Task go into "
            "the table [task]."
        )
    option, where = known[name], _line_of(text, path, key)
    try:
        converted = _converted(value, option.type)
    except TypeError:
        shown = f"{where}: {name} = {json.dumps(value, default=str)} is {_kind_of(value)}"
        raise SpecError(f"{shown}, and {_expected(option)} is needed.") from None
    if option.choices and converted not in option.choices:
        raise SpecError(f"{where}: {name}={value!r} is unknown. Choose one of {', '.join(option.choices)}.")
    return name, converted


def _converted(value: Any, kind: Any) -> Any:
    """Return a value of a file as an option takes it; raise TypeError where it does not fit."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        for part in typing.get_args(kind):
            if part is not type(None) and type(value) is part:
                return value
        return _converted(value, next(part for part in typing.get_args(kind) if part is not type(None)))
    if typing.get_origin(kind) is typing.Literal:
        if isinstance(value, str):
            return value.replace("_", "-") if value.replace("_", "-") in typing.get_args(kind) else value
        raise TypeError
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # save_every = 100
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError
    return value


def _expected(option: Option) -> str:
    if option.choices:
        return f"one of {', '.join(option.choices)}"
    kinds = [kind for kind in typing.get_args(option.type) if kind is not type(None)] or [option.type]
    return " or ".join(_WORDS[kind] for kind in kinds)


def _kind_of(value: Any) -> str:
    return _FOUND.get(type(value), "nothing" if value is None else f"of type {type(value).__name__}")


def _line_of(text: str, path: Path, key: str, after: int = 0) -> str:
    """Return FILE:LINE of a key, or FILE where it cannot be found."""
    pattern = re.compile(rf"""(?:^|[{{,\s])["']?{re.escape(key)}["']?\s*[=:]""")
    lines = text.splitlines()
    number = next((n for n in range(after, len(lines)) if pattern.search(lines[n])), None)
    return str(path) if number is None else f"{path}:{number + 1}"


def _text(value: Any) -> str:
    """Return the text that a command line would have for a value."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return value if isinstance(value, str) else repr(value)


def _parse_toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is not TOML: {error}.") from None


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"{path}:{error.lineno} is not JSON: {error.msg}.") from None


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise SpecError(f"config={path}: YAML needs a package. pip install pyyaml, or write TOML or JSON.") from None
    try:
        return _with_exponents(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark is not None else ""
        raise SpecError(f"{path}{at} is not YAML: {getattr(error, 'problem', None) or error}.") from None


def _with_exponents(value: Any) -> Any:
    """Return YAML's values with 1e-3 as a number, as YAML 1.2 has it; PyYAML reads text."""
    if isinstance(value, dict):
        return {key: _with_exponents(entry) for key, entry in value.items()}
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value


_PARSERS: dict[str, Callable[[str, Path], Any]] = {
    ".toml": _parse_toml,
    ".json": _parse_json,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}
"""By the ending of a file's name."""


def resolved(task: Task, spec: TrainSpec) -> dict[str, Any]:
    """Return the configuration of a training as plain values: options by name, and the Task's fields."""
    from instep.train.task import field_names

    options = {name: value for name, value in dataclasses.asdict(spec).items() if value is not None}
    return options | {TASK_TABLE: {name: _plain(getattr(task, name)) for name in field_names(type(task))}}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def config_text(task: Task, spec: TrainSpec) -> str:
    """Return the configuration of a training as TOML, which `--config` reads again."""
    values = resolved(task, spec)
    fields = values.pop(TASK_TABLE)
    lines = [f"# {type(task).__name__}"]
    for group in GROUPS:
        lines += ["", f"# {group}"]
        lines += [_line(o.name, values.get(o.name)) for o in options_of(type(spec)) if o.group == group]
    lines += ["", f"[{TASK_TABLE}]", *(_line(name, value) for name, value in fields.items())]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any) -> str:
    return f"# {name} is not set" if value is None else f"{name} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, str):  # TOML has JSON's escapes, but wants this character escaped, too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(_toml(entry) for entry in value)}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
