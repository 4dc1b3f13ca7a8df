"""Contrastive learning with a momentum encoder and a queue of keys (as in MoCo), in a loop of one's own.

    python examples/recipes/contrastive.py
    instep run -n 2 examples/recipes/contrastive.py  two processes, the same result

The queue takes the keys of the whole batch, in the order of its rows, so it is the same on all processes. It is in
every checkpoint, and so is the momentum encoder.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import instep


class Queue:
    """The newest keys, in a ring."""

    def __init__(self, size, width, device):
        self.keys = F.normalize(torch.randn(size, width, device=device))
        self.next = 0

    def add(self, keys):
        places = (self.next + torch.arange(len(keys), device=keys.device)) % len(self.keys)
        self.keys[places] = keys
        self.next = (self.next + len(keys)) % len(self.keys)

    def state_dict(self):
        return {"keys": self.keys, "next": self.next}

    def load_state_dict(self, state):
        self.keys.copy_(state["keys"])
        self.next = state["next"]


def gather_rows(world, rows):
    """Return the rows of all processes, in their order; a process may have more rows than another."""
    sizes = world.all_gather_object(len(rows))
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    return torch.cat([part[:size] for part, size in zip(world.all_gather(padded), sizes, strict=True)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    with instep.start(seed=0) as run:
        encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        encoder, _ = run.prepare(encoder, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))
        slow_encoder = AveragedModel(encoder, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        queue = Queue(256, 32, run.world.device)
        run.keep(slow_encoder=slow_encoder, queue=queue)

        for step in run.steps(instep.data.digits("train"), batch_size=64, epochs=args.epochs):
            new_keys = []
            for x, _ in step.shards():
                queries = F.normalize(encoder(x + 0.1 * torch.randn_like(x)))
                with torch.no_grad():
                    keys = F.normalize(slow_encoder(x + 0.1 * torch.randn_like(x)))
                logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.keys.T], dim=1) / 0.1
                step.backward(F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.int64, device=x.device)))
                new_keys.append(keys)
            record = step.finish()
            slow_encoder.update_parameters(encoder)
            queue.add(gather_rows(run.world, torch.cat(new_keys)))
            if step.ends_epoch and run.is_main:
                print(f"epoch {step.epoch + 1}: loss {record.loss:.6f}")


if __name__ == "__main__":
    main()
