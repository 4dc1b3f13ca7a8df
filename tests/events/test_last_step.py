"""How far a run is, by the end of its log."""

from __future__ import annotations

import json
from pathlib import Path

from instep.events.read import last_step, path_of


def test_the_last_step(tmp_path: Path) -> None:
    assert last_step(tmp_path) is None
    path = path_of(tmp_path)
    path.parent.mkdir()
    path.write_text(json.dumps({"event": "start", "rank": 0}) + "\n")
    assert last_step(tmp_path) is None
    with path.open("a") as file:
        for step in range(1, 4000):
            file.write(json.dumps({"event": "step", "step": step, "loss": 0.5}) + "\n")
        file.write('{"event": "step", "st')  # being written
    assert last_step(tmp_path) == 3999
    assert last_step(tmp_path, tail_bytes=100) == 3999
