"""What every command is made of: parameters from a spec's options, errors as exit codes, messages on standard error.

A command module imports what it needs to parse the command line, and the rest (torch takes seconds) inside its
functions, so that help and wrong options are answered at once.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand

from instep.cli.config import read_configs, without_rivals
from instep.cli.lone_flags import complete_flags
from instep.core.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_SPEC,
    EXIT_USER,
    InstepError,
    Interrupted,
    RanksFailed,
    SpecError,
)
from instep.core.launch_spec import LaunchSpec
from instep.core.options import GROUPS, OUTPUT, Option, options_of
from instep.core.spec import TrainSpec
from instep.launch.failures import describe, users_traceback
from instep.world.environment import launcher_here

if typing.TYPE_CHECKING:
    from instep.train.task import Task

S = TypeVar("S", bound=LaunchSpec)


_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""Of the click that this typer uses: its own, or the package."""


class Grouped(TyperCommand):
    """A command whose help shows options by group: its own first, then those of a spec."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **more: Any) -> Any:
        """Parse the command line; for one that is wrong, print the object that --json promises, too."""
        wants_json = "--json" in args
        try:
            return super().make_context(info_name, args, parent, **more)
        except _UsageError as error:
            if wants_json:
                _print_failure(EXIT_SPEC, error.format_message())
            raise
        except SpecError as error:
            if wants_json:
                _print_failure(EXIT_SPEC, str(error))
            leave(EXIT_SPEC, f"instep: {error}")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, on top of what the files of --config say."""
        with_value = {flag for parameter in self.get_params(ctx) for flag in _flags_with_value(parameter)}
        args = complete_flags(args, ctx.obj or {}, with_value, not ctx.allow_interspersed_args)
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        config = read_configs(given.get("config") or ())
        # Only options of the spec: one of this command may have the same name, and mean something else.
        shared = {parameter.name for parameter in self.get_params(ctx) if _heading(parameter) in GROUPS}
        options = without_rivals(config.options, given)
        ctx.default_map = {name: value for name, value in options.items() if name in shared}
        rest = list(super().parse_args(ctx, args))
        if config.assignments:
            ctx.params["values"] = [*config.assignments, *(ctx.params["values"] or [])]
        return rest

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


def _flags_with_value(parameter: Any) -> list[str]:
    is_flag = parameter.param_type_name != "option" or parameter.is_flag or parameter.count
    return [] if is_flag else list(parameter.opts)


def _heading(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    return OUTPUT if parameter.name == "help" else getattr(parameter, "rich_help_panel", None) or "Options"


def command(
    help: str,
    *parameters: inspect.Parameter,
    spec: type[LaunchSpec] | None = None,
    takes: Callable[[Option], bool] = lambda _: True,
    instead: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({}),
    cls: type[TyperCommand] = Grouped,
    **context_settings: Any,
) -> Callable[[Callable[..., int | None]], Any]:
    """Turn a function that returns an exit code into a command.

    The command has `parameters`, then one option for each field of a spec, or for those that `takes` selects, and
    --config if they are a training's; it gets what the files say as options and values. `instead` replaces the help
    text or default of options that mean something else to this command.
    """

    def decorate(function: Callable[..., int | None]) -> Any:
        guard = _guarded(function)
        files = (CONFIG,) if spec is not None and issubclass(spec, TrainSpec) else ()
        taken = [option for option in (options_of(spec) if spec else ()) if takes(option)]
        options = [_spec_option(o, instead.get(o.name, {})) for o in taken]
        signature = inspect.Signature([*parameters, *files, *options])
        guard.__signature__ = signature  # type: ignore[attr-defined]
        guard.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        parser = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        lone = {flag: (o.alone, o.pattern) for o in taken for flag in (o.flags if o.alone is not None else ())}
        settings = {"token_normalize_func": _with_dashes, "obj": lone, **context_settings}
        parser.command(cls=cls if spec else TyperCommand, help=help, context_settings=settings)(guard)
        return typer.main.get_command(parser)

    return decorate


def _with_dashes(name: str) -> str:
    """Return the name of an option as it is declared: torchrun also accepts --nproc_per_node for --nproc-per-node."""
    return name.replace("_", "-")


def _spec_option(field: Option, instead: Mapping[str, Any]) -> inspect.Parameter:
    default, kind = instead.get("default", field.default), field.type
    if _is_mixed(kind):
        default, kind = (None, str | None) if default is None else (str(default), str)
    help = instead.get("help", field.help)
    return option(field.name, kind, default, help, *field.flags, metavar=field.metavar, rich_help_panel=field.group)


def _is_mixed(kind: Any) -> bool:
    """Return whether an option takes numbers and words (`-n 4`, `-n auto`): the spec checks those, not the parser."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return False
    return len([argument for argument in typing.get_args(kind) if argument is not type(None)]) > 1


def option(name: str, kind: Any, default: Any, help: str, *flags: str, **more: Any) -> inspect.Parameter:
    """Return an option of one command. `flags` are needed only where they do not follow from the name."""
    flags = flags or (f"--{name.replace('_', '-')}",)
    argument = typer.Option(*flags, help=help, show_default=default is not None, **more)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, argument]
    )


def read_worlds(text: str) -> list[int]:
    """Return the numbers of processes that `--worlds` names; raise SpecError for anything else."""
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise SpecError(f"worlds={text!r} is not a list of numbers. Use for instance --worlds 1,2,4.") from None


def argument(name: str, kind: Any, metavar: str, help: str, **more: Any) -> inspect.Parameter:
    """Return a positional argument of a command."""
    annotation = Annotated[kind, typer.Argument(metavar=metavar, help=help)]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation, **more)


TASK = argument("task", str, "TASK.py[:Class]", "the file that defines the Task")
VALUES = argument("values", list[str] | None, "NAME=VALUE", "values for the Task's fields", default=None)


CONFIG = option(
    "config",
    list[str],
    (),
    "read options and the Task's fields from this file: .toml, .yaml, .json, a run's spec.json; may be repeated",
    metavar="FILE",
)


def make_spec(kind: type[S], values: Mapping[str, Any]) -> S:
    """Build a spec from parsed options."""
    processes = values.get("processes", 1)
    if isinstance(processes, str) and processes.lstrip("-").isdigit():
        values = {**values, "processes": int(processes)}
    try:
        return kind(**values)
    except TypeError as error:
        known = ", ".join(option.name for option in options_of(kind))
        raise SpecError(f"{error}. The options are {known}.") from None


def find_task(task: str, values: list[str] | None) -> tuple[Task, Path]:
    """Return the Task that `FILE.py:Class` and its values name, and its file."""
    from instep.train.source import load_file, make_task, task_class

    file, _, name = task.partition(":")
    path = Path(file)
    return make_task(task_class(load_file(path), path, name), values or []), path


def _guarded(function: Callable[..., int | None]) -> Callable[..., None]:
    """Exit with the code that a command returns, or with an error's message and code."""

    @functools.wraps(function)
    def guard(*arguments: Any, **options: Any) -> None:
        options.pop("config", None)  # was read when the command line was parsed

        def fail(exit_code: int, error: str, rank: int | None = None) -> int:
            if options.get("json"):
                _print_failure(exit_code, error, rank)
            return exit_code

        try:
            code = function(*arguments, **options)
        except KeyboardInterrupt as error:
            if isinstance(error, Interrupted) and error.saved:  # the result is shown
                leave(EXIT_INTERRUPTED)
            leave(fail(EXIT_INTERRUPTED, "interrupted"), str(error) or "interrupted")
        except RanksFailed as error:
            first = error.first
            leave(fail(first.exit_code, first.summary, None if first.names_ranks else first.rank), describe(error))
        except InstepError as error:
            leave(fail(error.exit_code, str(error)), f"instep: {error}")
        except Exception as error:
            code = fail(EXIT_USER, "".join(traceback.format_exception_only(error)).strip())
            if sys.flags.inspect or sys.gettrace() is not None:  # python -i, a debugger
                raise
            leave(code, users_traceback(error).rstrip())
        leave(code or EXIT_DONE)

    return guard


def _print_failure(exit_code: int, error: str, rank: int | None = None) -> None:
    """Print the object that --json promises; of ranks that another launcher started, the others may succeed."""
    if launcher_here() == "none":
        status = "interrupted" if exit_code == EXIT_INTERRUPTED else "failed"
        print_json({"status": status, "error": error, "rank": rank, "exit_code": exit_code})


def leave(exit_code: int, text: str = "") -> NoReturn:
    """Print a last message and exit; a rank exits without the interpreter's shutdown.

    A thread of gloo that is still running at the interpreter's shutdown may abort the process, and a rank whose process
    group is broken may never end. In both cases the exit code would be wrong.
    """
    if text:
        print(text, file=sys.stderr)
    if launcher_here() == "none":
        sys.exit(exit_code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def say(text: str) -> None:
    """Print a message to standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(values: Any) -> None:
    """Print values as one line of JSON."""
    print(json.dumps(values), flush=True)
