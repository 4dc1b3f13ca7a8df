"""The command `instep`: a table of its commands.

A command is one module, which makes it with `cli.command.command`, and one line here. A module is imported when its
command is used.
"""

import sysconfig
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from instep.core.version import __version__

COMMANDS = {
    "train": ("instep.cli.train:train", "Train the Task that a file defines."),
    "run": ("instep.cli.run:run", "Launch any script as torchrun does, and explain failures."),
    "init": ("instep.cli.init:init", "Start the file of a Task, also from a script of yours."),
    "verify": ("instep.cli.verify:verify", "Check that the number of processes does not change a training's result."),
    "check": ("instep.cli.check:check", "Run any script, and find silent distributed bugs in it."),
    "doctor": ("instep.cli.doctor:doctor", "Check this machine, or the network between several nodes."),
    "submit": ("instep.cli.app:submit", "Submit a training to SLURM or Kubernetes."),
    "jobs": ("instep.cli.jobs:jobs", "List the SLURM jobs that you submitted with instep, and their progress."),
    "cancel": ("instep.cli.jobs:cancel", "Cancel SLURM jobs, and wait until they have ended."),
    "evaluate": ("instep.cli.evaluate:evaluate", "Compute the metrics of a run's checkpoint."),
    "predict": ("instep.cli.predict:predict", "Write what a run's checkpoint predicts to a file."),
    "watch": ("instep.cli.watch:watch", "Show runs on a live page, while they train or afterwards."),
    "explain": ("instep.cli.explain:explain", "Say what bounded the speed of a run, and what to try next."),
    "track": ("instep.cli.track:track", "Send a run to trackers: csv, mlflow, tensorboard, trackio, wandb."),
    "tune": ("instep.cli.tune:tune", "Search hyper-parameters, or find a setting: lr, batch-size, workers."),
    "scale": ("instep.cli.scale:scale", "Measure how much faster a training is on more processes, and why not more."),
    "report": ("instep.cli.report:report", "Write a report of runs: results, curves, where the time went, incidents."),
    "checkpoints": ("instep.cli.checkpoints:checkpoints", "List, verify, prune or export the checkpoints of a run."),
}
SUBMIT_COMMANDS = {
    "slurm": ("instep.cli.submit_slurm:slurm", "Write a batch script and submit it."),
    "kubernetes": ("instep.cli.submit_kubernetes:kubernetes", "Write the manifests of a training, and apply them."),
}


def _group(table: Mapping[str, tuple[str, str]], help: str) -> typer.Typer:
    class Group(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**{**attributes, "commands": dict.fromkeys(table)})

        def get_command(self, _ctx: Any, name: str) -> Any:
            return resolve_name(table[name][0]) if name in table else None

        def format_commands(self, _ctx: Any, formatter: Any) -> None:
            with formatter.section("Commands"):
                formatter.write_dl([(name, text) for name, (_, text) in table.items()])

    return typer.Typer(
        cls=Group,
        help=help,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def docs_path() -> Path:
    """Return the folder of the documentation that help texts and errors cite as docs/…"""
    source = Path(__file__).parents[3] / "docs"  # of a checkout
    return source if source.is_dir() else Path(sysconfig.get_path("data")) / "share" / "doc" / "instep"


_HELP = "Train a PyTorch model on any number of processes; the number changes only the speed."
app = _group(COMMANDS, f"{_HELP}\n\nDocumentation (docs/…): {docs_path()}")
submit = typer.main.get_group(_group(SUBMIT_COMMANDS, COMMANDS["submit"][1]))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit
