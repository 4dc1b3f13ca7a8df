"""
Property regression with Accelerate, made for a preemptible queue: every job slice runs at most --slice_steps
optimizer steps, writes a full state and leaves; the next slice continues in the middle of the epoch.
"""
import argparse
import os
import shutil

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset


class Molecules(Dataset):
    """Fake descriptors; the target is a smooth function plus noise, descriptors are jittered while training."""

    def __init__(self, n, seed, jitter=0.0):
        w = torch.randn(20, 6, generator=torch.Generator().manual_seed(1234))
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 20, generator=g)
        self.y = torch.sin(self.x @ w / 3).sum(1) + 0.1 * torch.randn(n, generator=g)
        self.jitter = jitter

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        return (x + self.jitter * torch.randn_like(x) if self.jitter else x), self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU())
        self.head = nn.Linear(128, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


class Progress:
    def __init__(self):
        self.epoch, self.batch, self.best = 0, 0, float("inf")

    def state_dict(self):
        return dict(self.__dict__)

    def load_state_dict(self, state):
        self.__dict__.update(state)


@torch.no_grad()
def validate(accelerator, model, loader):
    model.eval()
    errors = []
    for x, y in loader:
        errors.append(accelerator.gather_for_metrics((model(x) - y).abs()))
    model.train()
    return torch.cat(errors).mean().item()


def run_slice(args):
    """Returns True once the requested number of epochs is done."""
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed))
    set_seed(args.seed, device_specific=True)

    train_dl = DataLoader(Molecules(1500, 0, jitter=0.05), batch_size=args.batch_size, shuffle=True)
    val_dl = DataLoader(Molecules(301, 1), batch_size=args.batch_size)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = args.epochs * len(train_dl)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 20) * max(0.0, 1 - s / total))
    model, optimizer, train_dl, val_dl, scheduler = accelerator.prepare(
        model, optimizer, train_dl, val_dl, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    state_dir = os.path.join(args.output_dir, "state")
    if os.path.isdir(state_dir):
        accelerator.load_state(state_dir)
        accelerator.print(f"resumed at epoch {progress.epoch}, batch {progress.batch}")

    done = 0
    while progress.epoch < args.epochs:
        train_dl.set_epoch(progress.epoch)
        loader = accelerator.skip_first_batches(train_dl, progress.batch) if progress.batch else train_dl
        for x, y in loader:
            loss = F.smooth_l1_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.batch += 1
            done += 1
            if done == args.slice_steps and progress.batch < len(train_dl):
                accelerator.save_state(state_dir)
                accelerator.wait_for_everyone()
                return False
        mae = validate(accelerator, model, val_dl)
        accelerator.print(f"epoch {progress.epoch} mae {mae:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
        progress.epoch, progress.batch = progress.epoch + 1, 0
        if mae < progress.best:
            progress.best = mae
            accelerator.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.output_dir, "best.pt"))
        accelerator.save_state(state_dir)
    accelerator.print(f"done, best mae {progress.best:.4f}")
    accelerator.wait_for_everyone()
    return True


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--slice_steps", type=int, default=30)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=21)
    ap.add_argument("--output_dir", default="out/molecules")
    ap.add_argument("--keep", action="store_true", help="continue an earlier run instead of starting over")
    args = ap.parse_args()

    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        if not args.keep:
            shutil.rmtree(args.output_dir, ignore_errors=True)
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    while not run_slice(args):
        pass
    accelerator.end_training()


if __name__ == "__main__":
    main()
