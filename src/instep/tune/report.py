"""The page of a search: Optuna's own plots in one file that needs nothing else."""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna

from instep.checkpoint.files import replace_synced
from instep.tune.result import TuneResult

_STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ccc; padding: .2rem .7rem; text-align: left; vertical-align: top; }
"""
_COMMON = ("slice", "parallel_coordinate", "param_importances")
_OF_ONE = ("optimization_history", "intermediate_values", *_COMMON)


def write_report(path: Path, result: TuneResult, study: optuna.Study) -> None:
    """Write the page of a search."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a plot that cannot be drawn says so on the page
    names = [goal.name for goal in result.goals]
    parts = [_figure(kind, study, names[0], None) for kind in _OF_ONE] if len(names) == 1 else _of_several(study, names)
    title = html.escape(f"{study.study_name}: {', '.join(names)}")
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<script>{_plotly()}</script></head><body><h1>{title}</h1>"
        f"<p>To train the best again: <code>{html.escape(result.command or 'no trial is complete')}</code></p>"
        f"{''.join(parts)}<h2>Trials</h2>{_table(result)}</body></html>"
    )
    replace_synced(path, page.encode())


def _of_several(study: optuna.Study, names: Sequence[str]) -> list[str]:
    """Return the figures of a search for several metrics."""
    parts = [_figure("pareto_front", study, names, None)] if len(names) <= 3 else []
    for number, name in enumerate(names):
        parts += [_figure(kind, study, name, _value_of(number)) for kind in _COMMON]
    return parts


def _value_of(number: int) -> Callable[[Any], float]:
    """Return what gives the value of a trial for a metric."""
    return lambda trial: float(trial.values[number])


def _figure(kind: str, study: optuna.Study, name: Any, target: Callable[[Any], float] | None) -> str:
    """Return one of Optuna's plots as HTML, or why it cannot be drawn."""
    options: dict[str, Any] = {"target_names" if kind == "pareto_front" else "target_name": name}
    if kind == "intermediate_values":
        options = {}
    if target is not None:
        options["target"] = target
    heading = f"<h2>{kind.replace('_', ' ').capitalize()}</h2>"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            figure = getattr(optuna.visualization, f"plot_{kind}")(study, **options)
        except (ValueError, RuntimeError, ImportError) as error:  # too few trials or parameters for this plot
            return f"{heading}<p>Not drawn: {html.escape(str(error))}</p>"
    return heading + str(figure.to_html(full_html=False, include_plotlyjs=False))


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _table(result: TuneResult) -> str:
    """Return all trials, best first."""
    names = list(dict.fromkeys(name for trial in result.trials for name in trial.params))
    head = ["trial", "state", *(goal.name for goal in result.goals), *names, ""]
    rows = []
    for trial in result.ranked():
        values = [f"{value:.6g}" for value in trial.values] + [""] * (len(result.goals) - len(trial.values))
        params = [str(trial.params.get(name, "")) for name in names]
        rows.append([str(trial.number), trial.state, *values, *params, trial.sentence])
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return (
        f"<table><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr>"
        + "".join(f"<tr>{row}</tr>" for row in cells)
        + "</table>"
    )
