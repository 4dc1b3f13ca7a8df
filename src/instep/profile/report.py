"""Merge the traces of a profile, and write its summary; done once, where the run ends.

Ranks: none, or one; no collectives.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from instep.profile.flame import SUFFIX, collect_flame
from instep.profile.summary import lines, markdown, summarize
from instep.profile.trace import RANK_SUFFIX, RankTrace, read_trace, write_merged

FOLDER = "profile"
SUMMARY = "summary"


def rank_files(folder: Path) -> list[Path]:
    """Return the files of the ranks' traces."""
    return sorted(path for path in folder.glob(f"rank-*{RANK_SUFFIX}") if not path.name.startswith("."))


def has_whole_profile(folder: Path) -> bool:
    """Return whether a rank has recorded all steps that it was to record."""
    for path in rank_files(folder):
        with contextlib.suppress(ValueError):  # broken: as good as none
            if read_trace(path).info.is_whole:
                return True
    return False


def write_report(folder: Path, asked: str, backends: Sequence[str]) -> list[str]:
    """Write trace.json.gz, summary.json and summary.md for the traces in a folder; return a few lines for a person.

    `asked` is the value of `--profile`: traces of other steps, of an earlier profile of the run, are removed.
    """
    for left_over in (*folder.glob(f".rank-*{RANK_SUFFIX}.*"), *folder.glob(".rank-*.raw.*")):
        left_over.unlink()  # by a rank that was killed while it wrote
    traces: list[RankTrace] = []
    problems: list[str] = []
    for path in rank_files(folder):
        try:
            trace = read_trace(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        if trace.info.asked == asked:
            traces.append(trace)
        else:
            path.unlink()
    if not traces:
        nothing = f"profile: no step of --profile {asked} was completed by a profiled rank; nothing is written."
        return [*problems, nothing]
    traces.sort(key=lambda trace: trace.info.rank)
    summary = summarize(traces, backends)
    for rank in summary["ranks"]:
        if why := collect_flame(folder, rank["rank"]):
            rank["notes"].append(why)
        graph = folder / f"rank-{rank['rank']}{SUFFIX}"
        rank["flame_graph"] = graph.name if graph.is_file() else None
    merged = write_merged(folder, traces)
    _write(folder / f"{SUMMARY}.json", json.dumps(summary, indent=1) + "\n")
    _write(folder / f"{SUMMARY}.md", markdown(summary))
    notes = sorted({note for rank in summary["ranks"] for note in rank["notes"]})
    where = f"  {folder / SUMMARY}.md, {merged} (open it at https://ui.perfetto.dev)"
    return [*problems, *lines(summary), *(f"  {note}" for note in notes), where]


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
