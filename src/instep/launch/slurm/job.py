"""What a SLURM job of instep's is: values only, checked. Room: imports no torch, starts nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from instep.core.errors import SpecError

NodeFailure = Literal["requeue", "continue"]
_INSTEAD = {
    **dict.fromkeys(("--nodes", "-N"), "instep's --nodes says how many"),
    **dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node"), "SLURM starts one launcher a node, and -n says how many"),
    **dict.fromkeys(("--ntasks-per-gpu", "--ntasks-per-core", "--ntasks-per-socket"), "-n says how many processes"),
    **dict.fromkeys(("--cpus-per-task", "-c"), "instep's --cpus-per-node says how many"),
    "--gpus-per-node": "instep's --gpus-per-node says how many",
    "--signal": "instep's --signal-before says when",
    **dict.fromkeys(("--output", "-o", "--error", "-e"), "the job's output is in logs/ of --run-dir"),
    **dict.fromkeys(("--chdir", "-D"), "the job runs where it is submitted: change to that directory before"),
    **dict.fromkeys(("--requeue", "--no-requeue"), "instep's --requeue or --no-requeue says so"),
    **dict.fromkeys(("--no-kill", "-k"), "instep's --on-node-failure says so"),
    "--comment": "instep jobs knows its jobs by theirs",
}
"""Options of sbatch that another option, or the script itself, decides."""
_EITHER = {
    "--array": "sweep",
    "-a": "sweep",
    "--time": "time",
    "-t": "time",
    "--partition": "partition",
    "-p": "partition",
}
"""Options of sbatch that are given once, here or there."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<dhours>\d+)(?::(?P<dminutes>\d+))?(?::(?P<dseconds>\d+))?|(?P<plain>[\d:]+))")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One value that differs between the jobs of an array."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]
    """What each job has on its command line: `lr=1e-3`, or an option of `train` (`--seed=3`, `--no-compile`)."""

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Read `lr=1e-3,3e-3,1e-2`."""
        name, equals, values = text.partition("=")
        found = tuple(values.split(","))
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name) or not all(found):
            raise SpecError(
                f"array={text!r} does not say what differs between the jobs. Write NAME=VALUE,VALUE,…, for instance "
                "lr=1e-3,3e-3. SLURM's own --array goes after --."
            )
        return cls(name=name, values=found, words=tuple(f"{name}={value}" for value in found))


@dataclass(frozen=True, kw_only=True)
class SubmitSpec:
    """A training as a SLURM job: what to run, on what, for how long."""

    name: str
    python: str
    """The interpreter on the nodes; the one that submits, since they share its disk."""
    cwd: Path
    run_dir: Path
    task: str
    """FILE.py[:Class], as the person wrote it, seen from `cwd`."""
    values: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Options of `instep train`, without those that say where."""
    processes: int | str = 1
    """On each node."""
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
    signal_before_s: int = 120
    requeue: bool = True
    on_node_failure: NodeFailure = "requeue"
    sbatch_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus_per_node", 1), ("cpus_per_node", 1), ("signal_before_s", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SpecError(f"{name}={value} cannot be: it must be at least {least}.")
        if self.on_node_failure not in ("requeue", "continue"):
            raise SpecError(f"on_node_failure={self.on_node_failure!r} is unknown. Choose requeue or continue.")
        for text in self.env:
            if not _ENV_NAME.fullmatch(text.partition("=")[0]) or "=" not in text:
                raise SpecError(f"set_env={text!r} sets no variable. Write NAME=VALUE.")
        self._check_sbatch_options()
        self._check_characters()
        self._check_time()

    def _check_sbatch_options(self) -> None:
        """Refuse what would win over the script, and starve or break the run."""
        for word in self.sbatch_options:
            name = option_name(word)
            if name in _INSTEAD:
                raise SpecError(f"{word} after -- cannot be: {_INSTEAD[name]}. Leave it out there.")
            if name in _EITHER and getattr(self, _EITHER[name]) is not None:
                ours = "--array" if _EITHER[name] == "sweep" else f"--{_EITHER[name]}"
                raise SpecError(f"{word} after -- and instep's {ours} say two things about one. Give one of them.")

    def _check_characters(self) -> None:
        words = (*self.values, *self.options, *self.env, *self.prelude, *self.sbatch_options)
        sweep = self.sweep.words if self.sweep else ()
        plain = (self.name, self.task, self.time, self.partition, str(self.cwd), str(self.run_dir))
        for word in (*words, *sweep, *filter(None, plain)):
            if any(ord(character) < 32 or ord(character) == 127 for character in word):
                raise SpecError(f"{word!r} has a line break or another character that a script cannot hold. Remove it.")

    def _check_time(self) -> None:
        if self.time is None or (limit_s := time_limit_s(self.time)) is None:
            return
        if limit_s <= self.signal_before_s:
            raise SpecError(
                f"time={self.time} leaves no time to train: {self.signal_before_s} s before its end the run is asked "
                "to save. Use a longer --time, or a smaller --signal-before."
            )

    @property
    def is_array(self) -> bool:
        """Whether several jobs come of it, by our own --array or by sbatch's."""
        return self.sweep is not None or any(option_name(word) in ("--array", "-a") for word in self.sbatch_options)

    @property
    def nnodes(self) -> str:
        """On how many nodes the ranks train, in elastic's words."""
        return f"1:{self.nodes}" if self.on_node_failure == "continue" and self.nodes > 1 else str(self.nodes)


def option_name(word: str) -> str:
    """Tell which option of sbatch a word is, of those known here; sbatch takes the beginning of a long one too."""
    if not word.startswith("--"):
        return word[:2]
    name = word.partition("=")[0]
    known = sorted(name for name in (*_INSTEAD, *_EITHER) if name.startswith("--"))
    begun = [each for each in known if each.startswith(name) and len(name) > len("--xx")]
    return name if name in known or name == "--gpus" or not begun else begun[0]


def time_limit_s(text: str) -> int | None:
    """Read SLURM's forms of a time: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None: without limit."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise SpecError(f"time={text!r} is not a time for SLURM. Write minutes, H:MM:SS or D-HH:MM:SS: 90, 2:00:00.")
    if match["days"] is not None:
        hours, minutes, seconds = (int(match[name] or 0) for name in ("dhours", "dminutes", "dseconds"))
        return ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    parts = match["plain"].split(":")
    if len(parts) > 3 or not all(parts):
        raise SpecError(f"time={text!r} is not a time for SLURM. Write minutes, H:MM:SS or D-HH:MM:SS: 90, 2:00:00.")
    numbers = [int(part) for part in parts]
    hours, minutes, seconds = {1: (0, *numbers, 0), 2: (0, *numbers), 3: tuple(numbers)}[len(numbers)]
    return (hours * 60 + minutes) * 60 + seconds
