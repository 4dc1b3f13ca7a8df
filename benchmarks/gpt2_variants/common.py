"""What all variants of the GPT-2 job share: the model, the data, the measurement."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from scaling_task import GPT2_VOCABULARY, Gpt2

BATCH, LENGTH, LR = 32, 1024, 3e-4
WARM_UP, STEPS = 20, 60

__all__ = ["BATCH", "LR", "STEPS", "WARM_UP", "Gpt2", "Stopwatch", "loss_of", "tokens"]


def tokens():
    """Made-up sequences, enough for all steps: inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randint(GPT2_VOCABULARY, (BATCH * 40, LENGTH + 1), generator=generator)
    return made[:, :-1].contiguous(), made[:, 1:].contiguous()


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


class Stopwatch:
    """Measures the steps after the first few; says so when there were enough."""

    def __init__(self):
        self._step, self._begun = 0, 0.0

    def step(self):
        """Count a step; tell whether to stop."""
        self._step += 1
        if self._step == WARM_UP:
            torch.cuda.synchronize()
            self._begun = time.perf_counter()
        return self._step == WARM_UP + STEPS

    def report(self, loss):
        torch.cuda.synchronize()
        ms = 1000 * (time.perf_counter() - self._begun) / STEPS
        memory = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps({"ms": ms, "loss": float(loss), "gib": memory}), flush=True)
