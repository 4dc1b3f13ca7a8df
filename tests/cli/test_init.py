"""`instep init`: what it writes trains, what it moves is what the script had, and what it cannot is marked."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import instep
from commands import ROOT, steps_in
from guide_runs import GUIDES, ORDERED
from instep.cli.init import task_name
from instep.cli.moving.reading import read_script
from instep.cli.moving.rewriting import MARK
from instep.cli.moving.writing import task_text
from instep.train.source import load_file, task_class

MNIST = """
import argparse
import torch
import torch.optim as optim
import torch.nn as nn, torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torchvision import datasets, transforms

class Net(nn.Module):
    def forward(self, x):
        return x

def train(args, model, device, train_loader, optimizer, epoch):
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()

def test(model, device, test_loader):
    for data, target in test_loader:
        pred = model(data).argmax(dim=1)
        correct = (pred == target).sum()

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    args = parser.parse_args()
    device = torch.device("cuda")
    settings = {"batch_size": args.batch_size}
    transform = transforms.ToTensor()
    dataset1 = datasets.MNIST("../data", train=True, transform=transform)
    dataset2 = datasets.MNIST("../data", train=False, transform=transform)
    train_loader = torch.utils.data.DataLoader(dataset1, **settings)
    test_loader = torch.utils.data.DataLoader(dataset2, batch_size=1000)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
"""
LIGHTNING = """
import pytorch_lightning as pl, torch
from torch import nn
from torch.utils.data import DataLoader, random_split
from mydata import MyData
WIDTH = 64

class Model(pl.LightningModule):
    def __init__(self, lr: float = 1e-3, width=WIDTH):
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(28, width)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, x):
        return self.first(x)

    def training_step(self, batch, batch_idx):
        images, labels = batch["image"], batch["label"]
        loss = self.criterion(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([{"params": self.parameters()}], lr=self.hparams.lr)

trained, held_out = random_split(MyData("all"), [0.9, 0.1])
trainer = pl.Trainer(max_steps=100, gradient_clip_val=0.5)
trainer.fit(Model(), DataLoader(trained, batch_size=16, shuffle=True), DataLoader(held_out, batch_size=16))
"""


def moved(source: str) -> Any:
    return task_text(read_script(source), "MyTask", "script.py", "task.py")


def body(text: str, method: str) -> str:
    (cls,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "MyTask"]
    (method_node,) = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == method]
    return "\n".join(ast.unparse(statement) for statement in method_node.body)


def test_a_task_that_trains_as_it_is(command: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "new one"
    code, out, err = command("init", str(folder), "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["file"], told["todo"]) == (str(folder / "task.py"), [])
    path = folder / "task.py"
    result = instep.train(
        task_class(load_file(path), path)(), epochs=1, threads=1, quiet=True, run_dir=str(tmp_path / "run")
    )
    assert result.metrics["accuracy"] > 0.5
    before = path.read_text()
    code, _, err = command("init", str(folder))
    assert code == 2
    assert "exists, and is not overwritten" in err
    assert path.read_text() == before


@pytest.mark.parametrize("name", list(ORDERED))
def test_a_guides_left_side_becomes_its_right_side(name: str, command: Any, tmp_path: Path) -> None:
    code, out, err = command("init", str(tmp_path / name), "--from", str(GUIDES / f"{name}_before.py"), "--json")
    assert code == 0, err
    told = json.loads(out)
    text = Path(told["file"]).read_text()
    assert told["todo"] == []
    assert MARK not in text.partition("\n")[2]
    words = told["command"].split()[3:]
    expected = (GUIDES / f"{name}_after.py").read_text().splitlines()[2].split()[3:]
    per_process = {"32": "64"} if name == "ddp" else {}
    assert [per_process.get(word, word) for word in words] == [word for word in expected if word not in ("-n", "2")]
    # It trains as the right side does, but for the weights to begin with.
    tasks = []
    for path in (Path(told["file"]), GUIDES / f"{name}_after.py"):
        task = task_class(load_file(path), path)()
        model = type(task).model
        type(task).model = lambda self, model=model: seeded(model, self)  # type: ignore[method-assign]
        folder = tmp_path / f"run-{path.stem}"
        instep.train(task, steps=4, threads=1, quiet=True, run_dir=str(folder), eval_every="never")
        tasks.append([event["loss"] for event in steps_in(folder)])
    assert tasks[0] == tasks[1]


def seeded(model: Any, task: Any) -> Any:
    import torch

    torch.manual_seed(0)
    return model(task)


def test_a_script_in_functions_with_a_command_line() -> None:
    made = moved(MNIST)
    assert made.command == "instep train task.py --epochs 14 --batch-size 64"
    assert "lr: float = 1.0" in made.text
    assert body(made.text, "model") == "return Net()"
    assert body(made.text, "optimizer") == "return optim.Adadelta(params, lr=self.lr)"
    assert (
        body(made.text, "train_data") == "return datasets.MNIST('../data', train=True, transform=transforms.ToTensor())"
    )
    assert body(made.text, "loss") == "data, target = batch\noutput = model(data)\nreturn F.nll_loss(output, target)"
    assert "model(data).argmax(dim=1) == target" in body(made.text, "metrics")
    assert body(made.text, "metrics").count("model(") == 1
    assert "'interval': 'epoch'" in body(made.text, "scheduler")
    assert "argparse" not in made.text
    assert made.todo == ()


def test_a_lightning_module_with_layers_of_its_own() -> None:
    made = moved(LIGHTNING)
    assert made.command == "instep train task.py --steps 100 --batch-size 16 --clip-norm 0.5"
    assert "class ModelNet(nn.Module):" in made.text
    assert "WIDTH = 64" in made.text
    assert "save_hyperparameters" not in made.text
    assert "pytorch_lightning" not in made.text
    assert body(made.text, "model") == "return ModelNet(lr=self.lr, width=self.width)"
    assert body(made.text, "loss").endswith("return nn.CrossEntropyLoss(label_smoothing=0.1)(model(images), labels)")
    assert [line.partition(":")[0] for line in made.todo] == ["optimizer", "train_data", "eval_data", "metrics"]
    assert f"# {MARK}: give random_split a generator" in made.text
    assert f"# {MARK}: your script passes groups" in made.text


def test_what_is_not_there_is_marked() -> None:
    for source in (
        "",
        "print('hello')",
        "import torch\nx = torch.randn(3)\nfor i in range(3):\n    x.sum().backward()\n",
    ):
        made = moved(source)
        assert [line.partition(":")[0] for line in made.todo] == ["model", "optimizer", "train_data", "loss"]
        assert made.text.count(f"# {MARK}") == 4
    made = moved("import torch\nfor x in DataLoader(make(path)):\n    loss = model(x, secret)\n    loss.backward()\n")
    assert f"# {MARK}: make, path came from elsewhere in your script" in made.text
    assert f"# {MARK}: secret came from elsewhere in your script" in made.text


def test_any_file_of_this_repository_gives_valid_python() -> None:
    for path in [*ROOT.glob("examples/**/*.py"), *ROOT.glob("src/instep/*/*.py")]:
        ast.parse(moved(path.read_text()).text)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("none.py", None, "No such file"),
        ("bad.py", b"x = = 1", "line 1: invalid syntax"),
        ("b.py", b"\xff\xfe", "read"),
    ],
)
def test_scripts_that_cannot_be_read(name: str, content: bytes | None, part: str, command: Any, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, _, err = command("init", str(tmp_path / "out"), "--from", str(tmp_path / name))
    assert code == 2
    assert part in err
    assert not (tmp_path / "out").exists()


def test_folders_that_cannot_be_written(command: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = command("init", str(tmp_path / "file" / "x"))
    assert code == 2
    assert "cannot be written" in err


def test_names() -> None:
    assert task_name("train_gpt") == "TrainGptTask"
    assert task_name("2-stage") == "My2StageTask"
    assert task_name("…") == "MyTask"
