"""Streaming data with Accelerate: only the model and the optimizer are prepared."""
import argparse
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def record(index):
    """Stands for reading and parsing one record of a big file."""
    g = torch.Generator().manual_seed(10_000 + index)
    x = torch.randn(12, generator=g)
    y = int((x[0] > 0) == (x[1] > 0)) + int(x[2] > 1)
    return x, y


class Stream(IterableDataset):
    def __init__(self, first, last, rank, world, shuffle=False, seed=0, even=True):
        self.first, self.last, self.rank, self.world = first, last, rank, world
        self.shuffle, self.seed, self.even, self.epoch = shuffle, seed, even, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.arange(self.first, self.last)
        if self.shuffle:
            g = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch)
            order = order[torch.randperm(len(order), generator=g)]
        info = get_worker_info()
        readers = self.world * (info.num_workers if info else 1)
        reader = self.rank * (info.num_workers if info else 1) + (info.id if info else 0)
        if self.even:
            order = order[: len(order) // readers * readers]
        for index in order[reader::readers].tolist():
            yield record(index)


@torch.no_grad()
def evaluate(accelerator, net, loader):
    net.eval()
    stat = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    for x, y in loader:
        x, y = x.to(accelerator.device), y.to(accelerator.device)
        logits = net(x)
        stat[0] += F.cross_entropy(logits, y, reduction="sum")
        stat[1] += (logits.argmax(1) == y).sum()
        stat[2] += len(y)
    net.train()
    stat = accelerator.reduce(stat, reduction="sum")
    return (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item(), int(stat[2])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--seed", type=int, default=33)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rank, world = accelerator.process_index, accelerator.num_processes
    set_seed(args.seed)

    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.6)
    model, optimizer = accelerator.prepare(model, optimizer)

    train = Stream(0, 1280, rank, world, shuffle=True, seed=args.seed)
    val = Stream(5000, 5203, rank, world, even=False)
    train_loader = DataLoader(train, batch_size=args.batch_size, num_workers=args.workers, drop_last=True)
    val_loader = DataLoader(val, batch_size=64)

    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        running, steps = torch.zeros((), device=accelerator.device), 0
        for x, y in train_loader:
            x, y = x.to(accelerator.device), y.to(accelerator.device)
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            running += loss.detach()
            steps += 1
        scheduler.step()
        running = accelerator.reduce(running / steps, reduction="mean")
        val_loss, acc, n = evaluate(accelerator, accelerator.unwrap_model(model), val_loader)
        accelerator.print(f"epoch {epoch} steps {steps} train {running.item():.4f} val {val_loss:.4f} acc {acc:.4f} n {n}")

    if accelerator.is_main_process:
        out = args.out or tempfile.mkdtemp(prefix="stream_")
        os.makedirs(out, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(out, "model.pt"))
        print("saved", out)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
