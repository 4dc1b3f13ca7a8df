"""`instep init`: start the file of a Task, a complete small one or one moved from a script."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from instep.cli.command import argument, command, option, print_json, say
from instep.core.errors import EXIT_DONE, SpecError

FILE = "task.py"
_TEMPLATE = '''\
"""A Task: what to train. Change it into yours, method by method; it trains as it is.

instep train {file} --epochs 5                      one process; -n 2 for two, with the same result
instep train {file} lr=3e-3 hidden=512              other values of the fields below
instep train {file} --print-config                  all options and fields, as a file for --config
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import instep


@dataclass(kw_only=True)
class MyTask(instep.Task):
    """Handwritten digits, 8x8."""

    # The hyper-parameters, with their defaults.
    lr: float = 1e-3
    hidden: int = 256

    def model(self):
        # Any nn.Module, on the CPU. The seed is set (--seed), and the model is moved and distributed for you.
        return nn.Sequential(nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=self.lr)

    def train_data(self):
        # Tensors, arrays, or any dataset with a length and samples by index; no DataLoader: --batch-size is the global
        # batch, and every sample occurs once an epoch.
        return instep.data.digits("train")

    def eval_data(self):
        return instep.data.digits("test")

    def loss(self, model, batch):
        # Call the model once, and return the mean over the batch; (mean, weight) if samples do not count alike.
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        # One value for each sample: averaged exactly over the whole evaluation set.
        x, y = batch
        return {{"accuracy": (model(x).argmax(1) == y).float()}}


if __name__ == "__main__":
    instep.main(MyTask)
'''


@command(
    "Start the file of a Task: DIR/task.py, complete and small, or moved from a script.",
    argument("directory", str, "DIR", "the folder to write task.py into; it is made if need be", default="."),
    option("script", str | None, None, "move what a training script has into the Task; it is read, not run", "--from"),
    option("json", bool, False, "print file, command and what is left to do as one line of JSON"),
)
def init(directory: str, script: str | None, json: bool) -> int:
    """Write the file; return the exit code."""
    path = Path(directory) / FILE
    if path.exists():
        raise SpecError(f"{path} exists, and is not overwritten. Give another folder, or move it away.")
    text, train, todo = _template(path) if script is None else _moved(Path(script), path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(text)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}. Give another folder.") from None
    say(f"wrote {path}")
    for line in todo:
        say(f"  to complete: {line}")
    say(f"train it: {train}")
    if json:
        print_json({"file": str(path), "command": train, "todo": list(todo), "status": "written"})
    return EXIT_DONE


def _template(path: Path) -> tuple[str, str, tuple[str, ...]]:
    return _TEMPLATE.format(file=path), f"instep train {path} --epochs 5", ()


def _moved(script: Path, path: Path) -> tuple[str, str, tuple[str, ...]]:
    from instep.cli.moving.reading import read_script
    from instep.cli.moving.writing import task_text

    try:
        source = script.read_text()
        parts = read_script(source)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise SpecError(f"from={script} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    except SyntaxError as error:
        raise SpecError(f"from={script}, line {error.lineno}: {error.msg}. It has to be Python to be read.") from None
    made = task_text(parts, task_name(script.stem), script.name, str(path))
    return made.text, made.command, made.todo


def task_name(stem: str) -> str:
    """Return the name of a Task's class for a script: `train_gpt.py` becomes TrainGptTask."""
    words = re.findall(r"[A-Za-z0-9]+", stem)
    name = "".join(word[:1].upper() + word[1:] for word in words)
    return f"{name}Task" if name.isidentifier() and not keyword.iskeyword(name) else f"My{name}Task"
