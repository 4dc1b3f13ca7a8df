"""The recipes of examples/recipes run, and give the same on one process and on several."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from commands import ROOT, result_of, run

RECIPES = ROOT / "examples" / "recipes"
pytestmark = pytest.mark.timeout(120)


def last_number(text: str) -> float:
    return float(re.findall(r"-?\d+\.\d+", text)[-1])


SLOW = pytest.mark.slow  # one recipe of each form runs in make test; test_commands.py has a notebook


@pytest.mark.parametrize(
    "name", ["gan", pytest.param("contrastive", marks=SLOW), pytest.param("policy_gradient", marks=SLOW)]
)
def test_a_loop_of_ones_own(name: str, tmp_path: Path) -> None:
    words = (str(RECIPES / f"{name}.py"), "--epochs", "1")
    alone, together = run("python", *words, cwd=tmp_path), run("instep", "run", "-n", "2", *words, cwd=tmp_path)
    assert (alone.returncode, together.returncode) == (0, 0), alone.stderr + together.stderr
    assert last_number(together.stdout) == pytest.approx(last_number(alone.stdout), rel=1e-5)


@pytest.mark.parametrize("name", ["vae", pytest.param("distillation", marks=SLOW), pytest.param("parquet", marks=SLOW)])
def test_a_task(name: str, tmp_path: Path) -> None:
    words = (str(RECIPES / f"{name}.py"), "--epochs", "1", "--json")
    alone = result_of(run("python", *words, cwd=tmp_path))
    together = result_of(run("instep", "train", *words, "-n", "2", cwd=tmp_path))
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert together["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)


@SLOW
def test_resume_in_a_notebook(tmp_path: Path) -> None:
    notebook = nbformat.read(RECIPES / "resume.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    *_, continued, history, best = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert continued.outputs[-1].data["text/plain"].startswith("(92, ")
    assert history.outputs[-1].data["text/plain"].count("(") == 4
    assert float(best.outputs[-1].data["text/plain"]) > 0.5
