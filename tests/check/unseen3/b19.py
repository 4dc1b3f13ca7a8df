"""Accelerate training that stops cleanly when the job slot runs out."""
import argparse
import os
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list, set_seed
from torch.utils.data import DataLoader, TensorDataset


class Forecaster(nn.Module):
    def __init__(self, window=24, hidden=48):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.rnn(x.unsqueeze(-1))
        return self.out(h[:, -1]).squeeze(-1)


def series(n, seed, window=24):
    g = torch.Generator().manual_seed(seed)
    f = 0.2 + 0.6 * torch.rand(n, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    t = torch.arange(window + 1).float()
    s = torch.sin(f * t + phase) + 0.05 * torch.randn(n, window + 1, generator=g)
    return TensorDataset(s[:, :window], s[:, window])


class Clock:
    def __init__(self, minutes):
        self.start = time.monotonic()
        self.limit = 60.0 * minutes

    def elapsed(self):
        return time.monotonic() - self.start

    def expired(self):
        return self.elapsed() > self.limit


class State:
    def __init__(self):
        self.epoch, self.step, self.best = 0, 0, float("inf")

    def state_dict(self):
        return dict(self.__dict__)

    def load_state_dict(self, sd):
        self.__dict__.update(sd)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    errs = []
    for x, y in loader:
        errs.append(accelerator.gather_for_metrics((model(x) - y).pow(2)))
    model.train()
    return torch.cat(errs).mean().sqrt().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--max_minutes", type=float, default=55.0)
    ap.add_argument("--seed", type=int, default=10)
    ap.add_argument("--resume", default=None)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    clock = Clock(args.max_minutes)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed))
    set_seed(args.seed)
    out = [(args.out or tempfile.mkdtemp(prefix="slot_")) if accelerator.is_main_process else None]
    out = broadcast_object_list(out)[0]

    train_loader = DataLoader(series(1024, 1), batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(series(222, 2), batch_size=64)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, T_max=args.epochs * len(train_loader))
    state = State()
    accelerator.register_for_checkpointing(scheduler, state)
    if args.resume:
        accelerator.load_state(args.resume)

    skip = state.step - state.epoch * len(train_loader)
    stopped = False
    for epoch in range(state.epoch, args.epochs):
        train_loader.set_epoch(epoch)
        loader = accelerator.skip_first_batches(train_loader, skip) if skip else train_loader
        skip = 0
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state.step += 1
            if state.step % 20 == 0:
                mean = accelerator.reduce(loss.detach(), reduction="mean").item()
                accelerator.print(f"step {state.step} loss {mean:.4f} ({clock.elapsed():.1f}s)")
            if clock.expired():
                stopped = True
                break
        if stopped:
            break
        rmse = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch} rmse {rmse:.4f}")
        state.epoch = epoch + 1
        if rmse < state.best:
            state.best = rmse
            if accelerator.is_main_process:
                torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(out, "best.pt"))

    accelerator.wait_for_everyone()
    accelerator.save_state(os.path.join(out, "resume"))
    accelerator.print(f"{'time is up' if stopped else 'finished'} at step {state.step}, state in {out}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
