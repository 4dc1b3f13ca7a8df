"""The same job as a Task: nothing in it knows of precision, compilation or devices."""

import atexit
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import instep

sys.path.insert(0, str(Path(__file__).parent))
from common import LR, Gpt2, loss_of, tokens


def note_peak():
    """Write this rank's peak memory where the benchmark looks for it."""
    if torch.cuda.is_initialized():
        path = Path(os.environ["PEAK_MEMORY"]) / f"peak-{os.getpid()}"
        path.write_text(json.dumps(torch.cuda.max_memory_allocated() / 2**30))


if "PEAK_MEMORY" in os.environ:
    atexit.register(note_peak)


@dataclass(kw_only=True)
class Job(instep.Task):
    """GPT-2 small on made-up tokens."""

    def model(self):
        return Gpt2()

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=LR)

    def train_data(self):
        return tokens()

    def loss(self, model, batch):
        return loss_of(model, *batch)


if __name__ == "__main__":
    instep.main(Job)
