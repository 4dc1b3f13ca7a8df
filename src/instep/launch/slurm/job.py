"""The options of a training, or of a search, as a SLURM job, checked. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from instep.core.errors import SpecError

NodeFailure = Literal["requeue", "continue"]
_INSTEAD = {
    **dict.fromkeys(("--nodes", "-N"), "instep's --nodes says how many"),
    **dict.fromkeys(
        ("--ntasks", "-n", "--ntasks-per-node"), "SLURM starts one launcher per node; -n says how many ranks"
    ),
    **dict.fromkeys(("--ntasks-per-gpu", "--ntasks-per-core", "--ntasks-per-socket"), "-n says how many ranks"),
    **dict.fromkeys(("--cpus-per-task", "-c"), "instep's --cpus-per-node says how many"),
    "--gpus-per-node": "instep's --gpus-per-node says how many",
    "--signal": "instep's --signal-before says when",
    **dict.fromkeys(("--output", "-o", "--error", "-e"), "the job's output is in logs/ of --run-dir"),
    **dict.fromkeys(("--chdir", "-D"), "the job runs where it is submitted: change to that directory first"),
    **dict.fromkeys(("--requeue", "--no-requeue"), "use instep's --requeue or --no-requeue"),
    **dict.fromkeys(("--no-kill", "-k"), "use instep's --on-node-failure"),
    "--comment": "instep jobs recognizes its jobs by their comment",
}
"""Options of sbatch that an option of instep, or the script, sets."""
_EITHER = {
    **dict.fromkeys(("--array", "-a"), "sweep"),
    **dict.fromkeys(("--time", "-t"), "time"),
    **dict.fromkeys(("--partition", "-p"), "partition"),
}
"""Options of sbatch that may be given to instep or after --, and the field that holds them."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The value that differs between the jobs of an array."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]
    """The word on each job's command line: `lr=1e-3`, or an option of `train` (`--seed=3`, `--no-compile`)."""

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Parse `lr=1e-3,3e-3,1e-2`."""
        name, equals, rest = text.partition("=")
        values = tuple(rest.split(","))
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name) or not all(values):
            raise SpecError(
                f"array={text!r} does not say what differs between the jobs. Write NAME=VALUE,VALUE,…, for instance "
                "lr=1e-3,3e-3. SLURM's own --array goes after --."
            )
        return cls(name=name, values=values, words=tuple(f"{name}={value}" for value in values))


@dataclass(frozen=True, kw_only=True)
class SubmitSpec:
    """A training as a SLURM job: what to run, on which nodes, for how long."""

    name: str
    python: str
    """The interpreter on the nodes: the one that submits, since they share its file system."""
    cwd: Path
    run_dir: Path
    task: str
    """FILE.py[:Class], as the user wrote it, relative to `cwd`."""
    values: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Options of `instep train`, without those that say where it runs."""
    processes: int | str = 1
    """Per node."""
    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    time: str | None = None
    partition: str | None = None
    env: tuple[str, ...] = ()
    """NAME=VALUE."""
    prelude: tuple[str, ...] = ()
    """Lines of bash before the training."""
    sweep: Sweep | None = None
    searchers: int | None = None
    """Jobs of an array that share one search of `instep tune` in `run_dir`; None: this is a training."""
    signal_before_s: int = 120
    requeue: bool = True
    on_node_failure: NodeFailure = "requeue"
    sbatch_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "cpus_per_node", "signal_before_s"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SpecError(f"{name}={value} is too small. Use at least 1.")
        if self.on_node_failure not in ("requeue", "continue"):
            raise SpecError(f"on_node_failure={self.on_node_failure!r} is unknown. Choose requeue or continue.")
        for text in self.env:
            if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", text):
                raise SpecError(f"set_env={text!r} does not set a variable. Write NAME=VALUE.")
        self._check_sbatch_options()
        self._check_characters()
        self._check_time()

    def _check_sbatch_options(self) -> None:
        """Raise SpecError for options of sbatch that would override what the script relies on."""
        for option in self.sbatch_options:
            name = option_name(option)
            if name in _INSTEAD:
                raise SpecError(f"{option} is not allowed after --: {_INSTEAD[name]}. Leave it out there.")
            is_searching = self.searchers is not None and _EITHER.get(name) == "sweep"
            if is_searching or (name in _EITHER and getattr(self, _EITHER[name]) is not None):
                ours = "--array" if _EITHER[name] == "sweep" else f"--{_EITHER[name]}"
                raise SpecError(f"{option} after -- and instep's {ours} set the same. Give one of them.")

    def _check_characters(self) -> None:
        for text in self.prelude:
            if "\n" in text:
                raise SpecError(
                    f"prelude={text!r} has several lines, and each --prelude is one, so that the one that fails can be "
                    "named. Repeat --prelude, or put the lines into a file: --prelude 'source FILE'."
                )
        words = (*self.values, *self.options, *self.env, *self.prelude, *self.sbatch_options)
        sweep = self.sweep.words if self.sweep else ()
        plain = (self.name, self.task, self.time, self.partition, str(self.cwd), str(self.run_dir))
        for text in (*words, *sweep, *filter(None, plain)):
            if re.search(r"[\x00-\x1f\x7f]", text):
                raise SpecError(f"{text!r} has a line break or control character. Remove it: a script cannot hold it.")

    def _check_time(self) -> None:
        if self.time is None or (limit_s := time_limit_s(self.time)) is None:
            return
        if limit_s <= self.signal_before_s:
            raise SpecError(
                f"time={self.time} leaves no time to train: the run saves {self.signal_before_s} s before its end. "
                "Use a longer --time, or a smaller --signal-before."
            )

    @property
    def is_array(self) -> bool:
        """Whether this is a job array, by instep's --array or by sbatch's."""
        return self.array is not None or any(option_name(option) in ("--array", "-a") for option in self.sbatch_options)

    @property
    def array(self) -> int | None:
        """The number of jobs in instep's own array; None: it makes none."""
        return len(self.sweep.values) if self.sweep else self.searchers

    @property
    def nnodes(self) -> str:
        """The number of nodes that train, as --nnodes takes it."""
        return f"1:{self.nodes}" if self.on_node_failure == "continue" and self.nodes > 1 else str(self.nodes)


def option_name(text: str) -> str:
    """Return the name of an option of sbatch, which also accepts the first letters of a long one."""
    if not text.startswith("--"):
        return text[:2]
    name = text.partition("=")[0]
    known = sorted(option for option in (*_INSTEAD, *_EITHER) if option.startswith("--"))
    completions = [option for option in known if option.startswith(name) and len(name) > len("--xx")]
    return name if name in known or name == "--gpus" or not completions else completions[0]


def time_limit_s(text: str) -> int | None:
    """Parse SLURM's forms of a time limit: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None means no limit."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if len(parts) > 3 or not all(part.isdecimal() for part in (*parts, days if dash else "0")):
        raise SpecError(f"time={text!r} is not a time for SLURM. Write minutes, H:MM:SS or D-HH:MM:SS: 90, 2:00:00.")
    if dash:
        parts += ["0", "0"]
    elif len(parts) < 3:
        parts = ["0", *parts, "0"]
    hours, minutes, seconds = map(int, parts[:3])
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
