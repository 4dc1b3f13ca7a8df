"""One launched test a command, and every example as its first lines say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from commands import ROOT, result_of, run, steps_in

EXAMPLES = ROOT / "examples"
MNIST = ROOT.parent / "shared" / "data" / "mnist"
SHORT = ("--epochs", "1", "--seed", "3", "--threads", "1", "--json")


@pytest.mark.slow  # tests/clusters/test_one_answer.py has the launchers, test_early_signals.py python -n 2
def test_one_file_under_every_local_launcher(tmp_path: Path) -> None:
    digits = str(EXAMPLES / "digits.py")
    ways = {
        "python": ("python", digits),
        "python -n 2": ("python", digits, "-n", "2"),
        "instep train": ("instep", "train", digits, "-n", "2"),
        "torchrun": ("torchrun", "--nproc-per-node", "2", "--master-port", "29673", digits),
    }
    actual = {}
    for name, words in ways.items():
        actual[name] = result_of(run(*words, *SHORT, "--run-dir", str(tmp_path / name)))
    assert {name: result["world_size"] for name, result in actual.items()} == {
        "python": 1,
        "python -n 2": 2,
        "instep train": 2,
        "torchrun": 2,
    }
    assert len({actual[name]["weights_sha256"] for name in ways if name != "python"}) == 1
    assert actual["python"]["loss"] == pytest.approx(actual["torchrun"]["loss"], rel=1e-5)
    assert len({result["metrics"]["accuracy"] for result in actual.values()}) == 1


def test_own_loop_under_run_and_python(tmp_path: Path) -> None:
    script = str(EXAMPLES / "own_loop.py")
    for name, words in {"one": ("python", script), "two": ("instep", "run", "-n", "2", script)}.items():
        folder = tmp_path / name
        folder.mkdir()
        done = run(*words, cwd=folder)
        assert done.returncode == 0, done.stderr
    one, two = (steps_in(next((tmp_path / name).rglob("events")).parent) for name in ("one", "two"))
    assert [e["loss"] for e in two] == pytest.approx([e["loss"] for e in one], rel=1e-3)


@pytest.mark.slow  # tests/launch/test_run_script.py runs the example
def test_plain_ddp_knows_nothing_of_instep() -> None:
    script = EXAMPLES / "plain_ddp.py"
    assert "import instep" not in script.read_text()
    done = run("instep", "run", "--nproc-per-node", "2", str(script), "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert "[rank0]" in done.stdout


def test_charlm_trains_token_weighted(tmp_path: Path) -> None:
    words = (
        "instep",
        "train",
        str(EXAMPLES / "charlm.py"),
        "-n",
        "2",
        "--steps",
        "12",
        "--json",
        "--run-dir",
        str(tmp_path),
    )
    actual = result_of(run(*words))
    losses = [e["loss"] for e in steps_in(tmp_path)]
    assert len(losses) == actual["steps"] == 12
    assert losses[-1] < 0.9 * losses[0]


def test_a_hugging_face_model(tmp_path: Path) -> None:
    words = ("python", str(EXAMPLES / "llama_lm.py"), "--steps", "2", "--json", "--run-dir", str(tmp_path / "run"))
    assert result_of(run(*words, timeout_s=110))["steps"] == 2


def test_curriculum_compares_orders(tmp_path: Path) -> None:
    words = ("python", str(EXAMPLES / "curriculum.py"), "--seeds", "1", "--epochs", "3", "--noise", "0.4")
    done = run(*words, cwd=tmp_path, timeout_s=110)
    assert done.returncode == 0, done.stderr
    accuracy = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()[2:]}
    assert len(accuracy) == 7
    assert all(30 < percent < 100 for percent in accuracy.values()), accuracy


@pytest.mark.slow  # tests/parity/test_transformers.py trains their Tasks, tests/train/test_huggingface.py exports
@pytest.mark.parametrize("name", ["bert_classifier", "llama_lm"])
def test_hugging_face_models_learn_and_are_exported(name: str, tmp_path: Path) -> None:
    words = (str(EXAMPLES / f"{name}.py"), "lr=3e-3", "--steps", "60", "--json", "--run-dir", str(tmp_path / "run"))
    actual = result_of(run("instep", "train", *words, "-n", "2", timeout_s=110))
    losses = [e["loss"] for e in steps_in(tmp_path / "run")]
    assert losses[-1] < 0.9 * losses[0]
    done = run(
        "instep", "checkpoints", str(tmp_path / "run"), "--export", "hf", "--out", str(tmp_path / "out"), "--json"
    )
    assert result_of(done)["weights_sha256"] == actual["weights_sha256"]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }


@pytest.mark.timeout(240)
@pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST's files are not here")
@pytest.mark.parametrize("world_sizes", [(2,), pytest.param((2, 1), marks=pytest.mark.slow)])  # parity has one and two
def test_mnist_reaches_its_accuracy_on_any_number_of_processes(world_sizes: tuple[int, ...], tmp_path: Path) -> None:
    accuracy = {}
    for processes in world_sizes:
        words = ("instep", "train", str(EXAMPLES / "mnist.py"), f"root={MNIST}", "-n", str(processes))
        options = ("--epochs", "3", "--batch-size", "128", "--json", "--eval-every", "never")
        done = run(*words, *options, "--run-dir", str(tmp_path / str(processes)), timeout_s=110)
        accuracy[processes] = result_of(done)["metrics"]["accuracy"]
    assert accuracy[2] >= 0.975
    right = {processes: round(10_000 * value) for processes, value in accuracy.items()}
    assert max(right.values()) - min(right.values()) <= 10, right  # of 10,000 images: 0.1 points


CELLS = [
    """
from dataclasses import dataclass
import torch, torch.nn.functional as F
from torch import nn
import instep

class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    def forward(self, x):
        return self.layers(x)

@dataclass(kw_only=True)
class Cell(instep.Task):
    hidden: int = 32
    def model(self): return Net(self.hidden)
    def optimizer(self, params): return torch.optim.Adam(params, lr=1e-2)
    def train_data(self): return instep.data.digits("train")
    def eval_data(self): return instep.data.digits("test")
    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)
    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": model(x).argmax(1) == y}
""",
    """
one, two = (instep.train(Cell(hidden=48), epochs=2, processes=n, run_dir=f"{folder}/{n}") for n in (1, 2))
""",
    """
x, y = instep.data.digits("test").gather(torch.arange(360))
accuracy = float((two.load_model()(x).argmax(1) == y).double().mean())
print(two.world_size, accuracy == two.metrics["accuracy"], one.metrics["accuracy"] == two.metrics["accuracy"])
""",
]


def test_a_task_of_a_notebook_cell_trains_on_two_processes(tmp_path: Path) -> None:
    cells: list[Any] = [nbformat.v4.new_code_cell(f"folder = {str(tmp_path)!r}\n")]
    cells += [nbformat.v4.new_code_cell(text) for text in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=50, kernel_name="python3").execute()
    printed = "".join(o.get("text", "") for o in notebook.cells[-1].outputs if o.get("name") == "stdout")
    assert printed.split() == ["2", "True", "True"]
