"""Run a guide's left side with instep's sample order, and its right side; return their losses and accuracies."""

from __future__ import annotations

import re
from pathlib import Path

from commands import steps_in

GUIDES = Path(__file__).parents[2] / "examples" / "guides"
_LINE = re.compile(r"^(?:\[rank(\d)\] )?(loss|accuracy) ([\d.]+)$", re.M)
ORDERED = {
    "ddp": ("DistributedSampler(train_set)", "OrderSampler(train_set, 0, dist.get_world_size(), dist.get_rank())"),
    "accelerate": ("shuffle=True", "sampler=OrderSampler(train_set)"),
    "lightning": ("shuffle=True", "sampler=OrderSampler(train_set)"),
    "trainer": (
        "    trainer.train()\n",
        "    trainer._get_train_sampler = lambda *_: OrderSampler(train_set)\n    trainer.train()\n",
    ),
}
"""The one change that gives a left side instep's order: no two shuffles agree."""


def left_script(name: str, folder: Path) -> Path:
    """Write a left side whose samples come in instep's order."""
    text = (GUIDES / f"{name}_before.py").read_text()
    before, after = ORDERED[name]
    assert text.count(before) == 1
    head, _, body = text.partition("\nimport torch\n")
    path = folder / f"{name}_before.py"
    path.write_text(f"{head}\nimport torch\nfrom instep.data import OrderSampler\n{body.replace(before, after)}")
    return path


def printed(text: str, num_ranks: int = 1) -> tuple[list[float], float]:
    """Return the loss of each step, the mean over the ranks, and the accuracy that a left side printed."""
    values = _LINE.findall(text)
    by_rank = [
        [float(v) for r, kind, v in values if kind == "loss" and int(r or 0) == rank] for rank in range(num_ranks)
    ]
    (accuracy,) = [float(value) for _, kind, value in values if kind == "accuracy"]
    return [sum(losses) / num_ranks for losses in zip(*by_rank, strict=True)], accuracy


def right_losses(run_dir: Path) -> list[float]:
    """Return the loss of each step of a right side's run."""
    return [event["loss"] for event in steps_in(run_dir)]
