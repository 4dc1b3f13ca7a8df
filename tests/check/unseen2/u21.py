"""Accelerate + iterable dataset; plain (unprepared) scheduler stepped once per update."""
import argparse
import math
import os
import tempfile
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Physics(IterableDataset):
    """Damped oscillators: predict (amplitude, damping) from a noisy trace. Same order on every process."""

    def __init__(self, n, seed, length=24):
        self.n, self.seed, self.length = n, seed, length
        self.epoch = 0

    def set_epoch(self, e):
        self.epoch = e

    def __len__(self):
        return self.n

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + 1000 * self.epoch)
        t = torch.linspace(0, 4, self.length)
        for _ in range(self.n):
            amp, damp = 0.5 + torch.rand(2, generator=g)
            x = amp * torch.exp(-damp * t) * torch.cos(5 * t) + 0.05 * torch.randn(self.length, generator=g)
            yield {"trace": x, "target": torch.stack([amp, damp])}


def cosine(total, warm):
    return lambda s: (s + 1) / warm if s < warm else 0.5 * (1 + math.cos(math.pi * (s - warm) / max(1, total - warm)))


def build(lr):
    net = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 2))
    decay, no_decay = [], []
    for name, p in net.named_parameters():
        (no_decay if name.endswith("bias") else decay).append(p)
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.02}, {"params": no_decay, "weight_decay": 0.0}], lr=lr)
    return net, opt


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "oscillator"))
    args = ap.parse_args()

    acc = Accelerator(cpu=True, mixed_precision="bf16")
    torch.manual_seed(77)
    net, opt = build(args.lr)
    stream, held = Physics(384, 1), Physics(90, 5)
    train_dl, eval_dl = DataLoader(stream, args.bs), DataLoader(held, args.bs)
    net, opt, train_dl, eval_dl = acc.prepare(net, opt, train_dl, eval_dl)

    updates = args.epochs * (384 // (args.bs * acc.num_processes))
    sched = torch.optim.lr_scheduler.LambdaLR(opt.optimizer, cosine(updates, 4))
    loss_fn = nn.SmoothL1Loss()

    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        net.train()
        seen = torch.zeros(2)
        for batch in train_dl:
            with acc.autocast():
                pred = net(batch["trace"])
            loss = loss_fn(pred.float(), batch["target"])
            acc.backward(loss)
            acc.clip_grad_norm_(net.parameters(), 2.0)
            opt.step()
            sched.step()
            opt.zero_grad()
            seen += torch.tensor([loss.item() * len(batch["trace"]), len(batch["trace"])])
        seen = acc.reduce(seen, reduction="sum")

        net.eval()
        errors = []
        for batch in eval_dl:
            with torch.no_grad():
                e = (net(batch["trace"]).float() - batch["target"]).abs()
            errors.append(acc.gather_for_metrics(e))
        errors = torch.cat(errors)
        acc.print(f"epoch {epoch} train {seen[0] / seen[1]:.4f} ({int(seen[1])} traces) "
                  f"mae amp {errors[:, 0].mean():.4f} damp {errors[:, 1].mean():.4f} "
                  f"n={len(errors)} lr {sched.get_last_lr()[0]:.2e}")

    acc.wait_for_everyone()
    if acc.is_main_process:
        os.makedirs(args.out, exist_ok=True)
        acc.save(acc.unwrap_model(net).state_dict(), os.path.join(args.out, "net.pt"))
        acc.save({"opt": opt.state_dict(), "sched": sched.state_dict()}, os.path.join(args.out, "train_state.pt"))
    acc.wait_for_everyone()
    time.sleep(0.5)  # let the gloo threads finish
    acc.end_training()


if __name__ == "__main__":
    main()
