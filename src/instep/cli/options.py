"""Turn a spec's fields into command-line options."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from instep.core.errors import SpecError
from instep.core.spec import LaunchSpec

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
        # A spec's own options are what people look for; how machines find each other comes last.
        own = vars(spec).get("__annotations__", {})
        fields = sorted(
            filter(only, dataclasses.fields(spec)), key=lambda f: f.name != "processes" and f.name not in own
        )
        parameters = [*before, *(_parameter(f, hints[f.name], instead.get(f.name, {})) for f in fields)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


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
        *words["flags"], help=words["help"], metavar=words["metavar"], show_default=default is not None
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
