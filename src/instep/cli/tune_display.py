"""The trials of a search, best first: a live table on a terminal, a line for each trial elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from instep.monitor.progress import duration
from instep.tune.result import GOING_ON, TrialRecord, TuneResult

_MOST_ROWS = 20


class TuneDisplay:
    """Shows a search on standard error while the `with` block lasts."""

    def __init__(self, num_trials: int, is_quiet: bool) -> None:
        self._num_trials, self._is_quiet = num_trials, is_quiet
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._shown: set[int] = set()
        self._is_first = True

    def __enter__(self) -> TuneDisplay:
        if self._console.is_terminal and not self._is_quiet:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, result: TuneResult) -> None:
        """Show what has changed."""
        if self._is_quiet:
            return
        if self._live is not None:
            self._live.update(self._table(result), refresh=True)
            return
        if self._is_first:
            self._is_first = False
            print(f"searching in {result.run_dir}", file=sys.stderr, flush=True)
            self._shown = {trial.number for trial in result.trials if trial.state not in GOING_ON}
        for trial in result.trials:
            if trial.state not in GOING_ON and trial.number not in self._shown:
                self._shown.add(trial.number)
                print(self._line(trial, result), file=sys.stderr, flush=True)

    def _line(self, trial: TrialRecord, result: TuneResult) -> str:
        best = result.best
        parts = [
            f"trial {trial.number + 1}/{self._num_of(result)}",
            trial.state,
            *_values(trial, result),
            params_text(trial.params),
            trial.sentence.splitlines()[0] if trial.sentence else "",
            f"best {best.number}" if best is not None else "",
            self._left(result),
        ]
        return "  ".join(filter(None, parts))

    def _num_of(self, result: TuneResult) -> int:
        """Return how many trials there are to be; copies (`--pruner pbt`) come on top of those that were asked for."""
        return max(self._num_trials, len(result.trials))

    def _left(self, result: TuneResult) -> str:
        """Return the estimated time that is left, in words."""
        times = [trial.wall_s for trial in result.trials if trial.wall_s is not None]
        ended = sum(trial.state not in GOING_ON for trial in result.trials)
        left = self._num_of(result) - ended
        if not times or left <= 0:
            return ""
        return f"about {duration(sum(times) / len(times) * left / result.at_once)} left"

    def _table(self, result: TuneResult) -> Table:
        ended = sum(trial.state not in GOING_ON for trial in result.trials)
        title = f"{result.run_dir}  {ended}/{self._num_of(result)} trials  {self._left(result)}{_packed(result)}"
        names = list(dict.fromkeys(name for trial in result.trials for name in trial.params))
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
        for name in ("trial", "state", *(goal.name for goal in result.goals), *names, ""):
            table.add_column(name, overflow="ellipsis", no_wrap=True)
        for trial in result.ranked()[:_MOST_ROWS]:
            values = [f"{value:.5g}" for value in trial.values] + [""] * (len(result.goals) - len(trial.values))
            params = [_short(trial.params.get(name, "")) for name in names]
            table.add_row(str(trial.number), trial.state, *values, *params, trial.sentence.partition("\n")[0])
        return table


def _packed(result: TuneResult) -> str:
    """Return in words what it brings to run several trials at once."""
    if result.speedup is None:
        return ""
    return f"  {result.at_once} at once: {result.speedup:.2f} times the samples a second of one"


def _values(trial: TrialRecord, result: TuneResult) -> list[str]:
    pairs = zip(result.goals, trial.values, strict=False)
    return [f"{goal.name} {value:.6g}" for goal, value in pairs]


def params_text(params: dict[str, Any]) -> str:
    """Return parameters in one line."""
    return " ".join(f"{name}={_short(value)}" for name, value in params.items())


def lineage_text(result: TuneResult, trial: TrialRecord) -> str:
    """Return the values that a trial, and those that it is a copy of, were trained with, the earliest first."""
    parts = []
    while (origin := trial.copied_from) is not None:
        after = origin["evaluation"]
        parts.append(f"after evaluation {after} {params_text(trial.params)} (trial {trial.number})")
        trial = result.trials[origin["trial"]]
    return ", ".join([f"{params_text(trial.params)} (trial {trial.number})", *reversed(parts)])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
