"""Flame graphs by py-spy, and in one sentence why there is none."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

import patience
from instep.profile import flame
from instep.profile.flame import FlameGraph, collect_flame, describe_failure, find_py_spy, forget_flame


def fake(folder: Path, text: str) -> str:
    """Write a program that takes py-spy's place."""
    program = folder / "py-spy"
    program.write_text(f"#!{sys.executable}\nimport sys, time, signal, pathlib\n{text}\n")
    program.chmod(0o755)
    return str(program)


OUTPUT = "out = pathlib.Path(sys.argv[sys.argv.index('--output') + 1])"


def test_a_graph_is_there_when_it_is_complete(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    text = f"""
{OUTPUT}
def end(*_):
    out.write_text('<svg/>')
    sys.exit()
signal.signal(signal.SIGINT, end)
pathlib.Path({str(ready)!r}).touch()
time.sleep(60)"""
    graph = FlameGraph(fake(tmp_path, text), os.getpid(), tmp_path, 3)
    deadline = time.monotonic() + 20 * patience.PATIENCE
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not (tmp_path / "rank-3.flame.svg").exists()
    graph.finish()
    assert (tmp_path / "rank-3.flame.svg").read_text() == "<svg/>"
    assert collect_flame(tmp_path, 3) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["py-spy", "rank-3.flame.svg", "ready"]
    forget_flame(tmp_path, 3)
    assert not (tmp_path / "rank-3.flame.svg").exists()


def test_a_rank_that_was_killed_leaves_its_graph(tmp_path: Path) -> None:
    (tmp_path / ".rank-1.flame.svg").write_text("<svg/>")
    (tmp_path / "rank-1.flame.log").write_text("py-spy> Wrote flamegraph data")
    assert collect_flame(tmp_path, 1) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.flame.svg"]


def test_a_refusal_is_one_sentence(tmp_path: Path) -> None:
    text = (
        "print('Error: Permission Denied: Try running again with elevated permissions', file=sys.stderr); sys.exit(1)"
    )
    graph = FlameGraph(fake(tmp_path, text), os.getpid(), tmp_path, 0)
    graph._process.wait(20 * patience.PATIENCE)
    graph.finish()
    why = collect_flame(tmp_path, 0)
    assert why.startswith("No flame graph: py-spy may not read this process.")
    assert "SYS_PTRACE" in why


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("", "the run ended before"),
        ("py-spy> Sampling process 100 times a second for 5 seconds. Press Control-C to exit.", "the run ended before"),
        ("Error: No stack counts found", "the run ended before"),
        ("Error: Failed to find python version from target process\n", "py-spy said: Error: Failed to find python"),
    ],
)
def test_why_there_is_none(log: str, sentence: str) -> None:
    assert sentence in describe_failure(log)


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_py_spy() is None
    assert "pip install 'instep[profile]'" in flame.MISSING
    fake(tmp_path, "")
    assert find_py_spy() == str(tmp_path / "py-spy")


@pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")
def test_a_real_one_names_the_function(tmp_path: Path) -> None:
    def busy_in_this_function(until: float) -> None:
        while time.monotonic() < until:
            sum(range(1000))

    program = find_py_spy()
    assert program is not None
    graph = FlameGraph(program, os.getpid(), tmp_path, 0)
    deadline = time.monotonic() + 30 * patience.PATIENCE
    log = tmp_path / "rank-0.flame.log"
    while "Sampling" not in log.read_text() and graph._process.poll() is None and time.monotonic() < deadline:
        busy_in_this_function(time.monotonic() + 0.1)
    busy_in_this_function(time.monotonic() + 0.5)
    graph.finish()
    why = collect_flame(tmp_path, 0)
    if "may not read" in why:
        pytest.skip(why)
    assert "busy_in_this_function" in (tmp_path / "rank-0.flame.svg").read_text(), why
