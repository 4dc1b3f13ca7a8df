"""Merge the traces of a profile, and write its summary; done once, where the run ends.

Ranks: none, or one; no collectives.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from instep.profile.flame import LOG_SUFFIX, SUFFIX, describe_failure
from instep.profile.summary import lines, markdown, summarize
from instep.profile.trace import RANK_SUFFIX, RankTrace, read_trace, write_merged

FOLDER = "profile"
SUMMARY = "summary"


def rank_files(folder: Path) -> list[Path]:
    """Return the files of the ranks' traces."""
    return sorted(path for path in folder.glob(f"rank-*{RANK_SUFFIX}") if not path.name.startswith("."))


def write_report(folder: Path, asked: str, backends: Sequence[str]) -> list[str]:
    """Write trace.json.gz, summary.json and summary.md for the traces in a folder; return a few lines for a person.

    `asked` is the value of `--profile`: traces of other steps, of an earlier profile of the run, are removed.
    """
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
        graph, log = (folder / f"rank-{rank['rank']}{suffix}" for suffix in (SUFFIX, LOG_SUFFIX))
        if graph.is_file():
            rank["flame_graph"] = graph.name
        elif log.is_file():
            rank["notes"].append(describe_failure(log.read_text(errors="replace")))
            log.unlink()
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
