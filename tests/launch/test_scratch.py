"""The scratch folder, and the folders of launches that were killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from instep.launch.scratch import open_scratch


def left_by_another(place: Path, name: str, age_s: float = 3600) -> Path:
    folder = place / name
    (folder / "logs").mkdir(parents=True)
    os.mkfifo(folder / "lifeline")
    then = folder.stat().st_mtime - age_s
    os.utime(folder, (then, then))
    return folder


def test_folders_that_nobody_holds_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, new = left_by_another(tmp_path, "instep-dead"), left_by_another(tmp_path, "instep-new", age_s=5)
    held, other = left_by_another(tmp_path, "instep-held"), tmp_path / "instep-other"
    other.mkdir()
    (other / "lifeline").write_text("a file of another program, which happens to have this name")
    os.utime(other, (0, 0))
    holder = os.open(held / "lifeline", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with open_scratch() as scratch:
            assert scratch.lifeline.exists()
            with open_scratch():
                assert scratch.lifeline.exists()
    finally:
        os.close(holder)
    assert not dead.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([new.name, held.name, other.name])


def test_a_link_to_elsewhere_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = left_by_another(tmp_path, "precious")
    place = tmp_path / "tmp"
    place.mkdir()
    (place / "instep-link").symlink_to(elsewhere)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with open_scratch():
        pass
    assert (elsewhere / "logs").is_dir()
