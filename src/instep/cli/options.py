"""Turn a spec's fields into command-line options."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from instep.core.errors import SpecError
from instep.core.spec import GROUPS, OUTPUT, LaunchSpec

S = typing.TypeVar("S", bound=LaunchSpec)


def with_options(
    spec: type[LaunchSpec],
    *before: inspect.Parameter,
    only: Callable[[dataclasses.Field[Any]], bool] = lambda _: True,
    instead: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({}),
) -> Callable[[Callable[..., Any]], Any]:
    """Give a command the parameters in `before`, then one option for each field of a spec, or for `only` some.

    `instead` has the help text or the default of fields that mean something else to this command.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = typing.get_type_hints(spec)
        fields = filter(only, dataclasses.fields(spec))
        parameters = [*before, *(_parameter(f, hints[f.name], instead.get(f.name, {})) for f in fields)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


class Grouped(TyperCommand):
    """A command whose help shows options by group: its own first, then those of a spec."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a heading for each group that has options here."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", "Options", *GROUPS)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections[_heading(parameter)].append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def _heading(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    return OUTPUT if parameter.name == "help" else getattr(parameter, "rich_help_panel", None) or "Options"


def make_spec(kind: type[S], values: Mapping[str, Any]) -> S:
    """Build a spec from parsed options."""
    processes = values.get("processes", 1)
    if isinstance(processes, str) and processes.lstrip("-").isdigit():
        values = {**values, "processes": int(processes)}
    try:
        return kind(**values)
    except TypeError as error:
        known = ", ".join(f.name for f in dataclasses.fields(kind))
        raise SpecError(f"{error}. The options are {known}.") from None


def _parameter(field: dataclasses.Field[Any], hint: Any, instead: Mapping[str, Any]) -> inspect.Parameter:
    words = {"default": field.default, **field.metadata, **instead}
    default = words["default"]
    option = typer.Option(
        *words["flags"],
        help=words["help"],
        metavar=words["metavar"],
        show_default=default is not None,
        rich_help_panel=words["group"],
    )
    if _is_mixed(hint):
        default, hint = (None, str | None) if default is None else (str(default), str)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option]
    )


def _is_mixed(hint: Any) -> bool:
    """Tell whether a field takes numbers and words (`-n 4`, `-n auto`): then the spec decides, not the parser."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return False
    return len([argument for argument in typing.get_args(hint) if argument is not type(None)]) > 1
