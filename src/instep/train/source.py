"""Load the Task that a user names, and pass it to the workers.

A Task in a file is passed as the file's path and the values of its fields, and each worker loads the file. A Task
that was defined in a notebook, or made in a program, is pickled and passed to our own child processes.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import importlib.util
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from instep.core.errors import SpecError
from instep.core.nearest import nearest
from instep.train.task import Task, field_names, fields_of

_LOADING: list[Path] = []
"""The file that is being loaded, if one is."""


@dataclass(frozen=True)
class TaskSource:
    """What a worker loads its Task from."""

    path: str = ""
    class_name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    payload: bytes = b""

    @classmethod
    def of_file(cls, path: Path, task: Task) -> TaskSource:
        """Return the source of a Task whose class a file defines."""
        values = {name: getattr(task, name) for name in field_names(type(task))}
        return cls(path=str(path.resolve()), class_name=type(task).__name__, values=values)

    @classmethod
    def of_value(cls, task: Task) -> TaskSource:
        """Return the source of a Task that is passed by value."""
        return cls(class_name=type(task).__name__, payload=cloudpickle.dumps(task))

    def load(self) -> Task:
        """Load the Task."""
        if self.payload:
            task = cloudpickle.loads(self.payload)
            assert isinstance(task, Task)
            return task
        return task_class(load_file(Path(self.path)), Path(self.path), self.class_name)(**self.values)


def file_of(cls: type) -> Path | None:
    """Return the file from which a class can be loaded by its name; None for one from a notebook or a function."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if not file or cls.__qualname__ != cls.__name__ or not hasattr(module, cls.__name__):
        return None
    path = Path(file).resolve()
    return path if path.suffix == ".py" and path.is_file() else None


def module_of(path: Path) -> types.ModuleType:
    """Return the module of a file: the one that this program has imported, or a new one."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(path.name) and Path(file).resolve() == path.resolve():
            return module
    return load_file(path)


def load_file(path: Path) -> types.ModuleType:
    """Execute a Python file as a module, with its directory first on the path, as python would."""
    if not path.is_file():
        raise SpecError(f"{path} does not exist." if not path.exists() else f"{path} is not a file.")
    if path.suffix != ".py":
        raise SpecError(f"{path} is not a Python file. A Task is a class in a .py file.")
    directory = str(path.resolve().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    known = sys.modules.get(path.stem)
    is_other = known is not None and getattr(known, "__file__", None) != str(path)
    name = f"task_{path.stem}" if is_other else path.stem  # a file called random.py must not replace Python's
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Under its own name, so that loader processes, which import anew, find its classes.
    sys.modules[name] = module
    before = _LOADING[:]
    _LOADING[:] = [path]
    try:
        spec.loader.exec_module(module)
    finally:
        _LOADING[:] = before
    return module


def refuse_while_loading(what: str) -> None:
    """Raise SpecError if a Task's file is being loaded: a training that it starts would load it again, and again."""
    if _LOADING:
        raise SpecError(
            f"{_LOADING[0]} calls {what} when it is loaded, not only when it is run. Put the call under "
            '`if __name__ == "__main__":`.'
        )


def task_class(module: types.ModuleType, path: Path, name: str = "") -> type[Task]:
    """Return the Task class of a file: the one that is named, or the only one."""
    tasks = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Task) and value is not Task
    }
    own = {key: value for key, value in tasks.items() if value.__module__ == module.__name__}
    if name:
        if name not in tasks:
            known = ", ".join(tasks) or "none"
            raise SpecError(f"{path} has no Task called {name!r}. Its Tasks: {known}.")
        return _checked(tasks[name], path)
    if not own:
        raise SpecError(f"{path} defines no Task. Derive a class from instep.Task, as in examples/digits.py.")
    leaves = [cls for cls in own.values() if not any(cls in other.__mro__[1:] for other in own.values())]
    if len(leaves) > 1:
        names = ", ".join(cls.__name__ for cls in leaves)
        raise SpecError(f"{path} defines several Tasks ({names}). Say which: {path}:{leaves[0].__name__}")
    return _checked(leaves[0], path)


def _checked(cls: type[Task], where: Path | str) -> type[Task]:
    bare = [name for name in vars(cls).get("__annotations__", {}) if name not in field_names(cls)]
    if not dataclasses.is_dataclass(cls) and bare:
        raise SpecError(
            f"{where}: {cls.__name__} annotates {', '.join(bare)} but is no dataclass, so they cannot be set. "
            "Put @dataclass(kw_only=True) above the class."
        )
    missing = [m for m in ("model", "optimizer", "train_data", "loss") if getattr(cls, m) is getattr(Task, m)]
    if missing:
        raise SpecError(f"{where}: {cls.__name__} does not define {', '.join(missing)}; a Task needs all of those.")
    return cls


def make_task(cls: type[Task], assignments: Sequence[str], known: Mapping[str, Any] | None = None) -> Task:
    """Return a Task with fields set from `name=value` texts; `known` are values of others."""
    cls = _checked(cls, cls.__module__)
    names = field_names(cls)
    listed = ", ".join(names) or "none"
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = dict(known or {})
    for text in assignments:
        name, equals, value = text.partition("=")
        where = f"{origin}: " if (origin := getattr(text, "origin", "")) else ""  # a file of --config
        if not equals:
            raise SpecError(f"{text!r} is neither an option nor name=value. Fields of {cls.__name__}: {listed}.")
        if name not in names:
            raise SpecError(f"{where}{cls.__name__} has no field {name!r}.{nearest(name, names)} Its fields: {listed}.")
        try:
            values[name] = parse_value(name, value, hints[name])
        except SpecError as error:
            raise SpecError(f"{where}{error}") from None
    unset = [f.name for f in fields_of(cls) if f.default is f.default_factory is dataclasses.MISSING]
    missing = [name for name in unset if name not in values]
    if missing:
        raise SpecError(f"{cls.__name__} needs values for {', '.join(missing)}: give {missing[0]}=VALUE.")
    return cls(**values)


def _items(text: str) -> list[str]:
    """Return the items of `1,2`, `[1, 2]`, or, with commas in them, `["a,b", "c"]`."""
    if text[:1] in ("[", "(") and ("'" in text or '"' in text):
        with contextlib.suppress(ValueError, SyntaxError):
            return [str(item) for item in ast.literal_eval(text)]
    return [item.strip() for item in text.strip("[]()").split(",") if item.strip()]


def parse_value(name: str, text: str, kind: Any) -> Any:
    """Read a field's value from text by its annotation; a SpecError says what was expected."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is str:
        return text
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and text.lower() in ("none", "null", ""):
            return None
        for argument in arguments:
            with contextlib.suppress(SpecError):
                return parse_value(name, text, argument)
        raise SpecError(f"{name}={text!r} does not fit {kind}.")
    if origin is typing.Literal:
        for choice in arguments:
            if text == str(choice):
                return choice
        raise SpecError(f"{name}={text!r} is not one of {', '.join(map(str, arguments))}.")
    if origin in (list, tuple):
        return origin(parse_value(name, item, arguments[0] if arguments else str) for item in _items(text))
    if kind is bool:
        if text.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return text.lower() in ("true", "yes", "on", "1")
        raise SpecError(f"{name}={text!r} is not a bool. Write true or false.")
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if text in kind.__members__:
            return kind[text]
        raise SpecError(f"{name}={text!r} is not one of {', '.join(kind.__members__)}.")
    if kind in (int, float, Path):
        try:
            return kind(text)
        except ValueError:
            expected, example = ("a whole number", "3") if kind is int else ("a number", "0.001")
            raise SpecError(f"{name}={text!r} is not {expected}. Write for instance {name}={example}.") from None
    raise SpecError(f"{name} is annotated {kind!r}, which cannot be set from the command line.")
