"""What the ranks printed: pieces of their log files, as text that a page can show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from instep.core.errors import SpecError

PIECE_BYTES = 2**16
_LOG_FILE = re.compile(r"rank-(\d+)(\.stdout|\.stderr)?\.log")
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)
_OVERWRITTEN = re.compile(r"[^\n]*\r(?!\n)")
_HANG_BYTES = 2**20


def log_files(run_dir: Path) -> list[dict[str, Any]]:
    """Return the logs of a run: rank, name and size, by rank."""
    folder = run_dir / "logs"
    matches = (
        [match for path in folder.iterdir() if (match := _LOG_FILE.fullmatch(path.name))] if folder.is_dir() else []
    )
    files = [(int(match[1]), match[0]) for match in matches]
    return [{"rank": rank, "name": name, "num_bytes": (folder / name).stat().st_size} for rank, name in sorted(files)]


def log_piece(run_dir: Path, name: str, before: int | None = None, after: int | None = None) -> dict[str, Any]:
    """Return a piece of a log, of whole lines: its end, or what lies before or after a position."""
    if _LOG_FILE.fullmatch(name) is None or not (path := run_dir / "logs" / name).is_file():
        raise SpecError(f"{name!r} is no log of this run. Its logs: {_names(run_dir)}.")
    num_bytes = path.stat().st_size
    if after is not None and not 0 <= after <= num_bytes:  # the file was replaced
        after = None
    end = num_bytes if before is None else max(0, min(before, num_bytes))
    begin = max(0, end - PIECE_BYTES) if after is None else after
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read(min(end - begin, PIECE_BYTES))
    if after is None and begin > 0 and b"\n" in data:
        cut = data.index(b"\n") + 1
        begin, data = begin + cut, data[cut:]
    return {"begin": begin, "end": begin + len(data), "num_bytes": num_bytes, "text": plain_text(data)}


def hang_sentences(run_dir: Path) -> list[str]:
    """Return the sentences with which the launcher ended hung attempts: it writes them to the log of a rank."""
    sentences = []
    for file in log_files(run_dir):
        path = run_dir / "logs" / file["name"]
        with path.open("rb") as opened:
            opened.seek(max(0, file["num_bytes"] - _HANG_BYTES))
            lines = plain_text(opened.read()).splitlines()
        sentences += [line for line in lines if line.startswith("hung: ")]
    return sentences


def plain_text(data: bytes) -> str:
    """Return what a terminal would show in the end, without colours: of a line that was overwritten, the last form."""
    return _OVERWRITTEN.sub("", _ESCAPES.sub("", data.decode(errors="replace")).replace("\r\n", "\n"))


def _names(run_dir: Path) -> str:
    return ", ".join(file["name"] for file in log_files(run_dir)) or "none"
