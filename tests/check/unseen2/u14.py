import argparse
import logging
import math
import os
import tempfile
import time

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__)


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    y = ((x[:, :3].prod(1) + x[:, 4]) > 0).long()
    return TensorDataset(x, y)


def make_model(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def lr_lambda(total, warmup):
    def f(step):
        if step < warmup:
            return step / max(1, warmup)
        return max(0.0, (total - step) / max(1, total - warmup))
    return f


def evaluate(accelerator, model, loader):
    model.eval()
    preds, refs = [], []
    for x, y in loader:
        with torch.no_grad():
            out = model(x).argmax(-1)
        p, r = accelerator.gather_for_metrics((out, y))
        preds.append(p)
        refs.append(r)
    preds, refs = torch.cat(preds), torch.cat(refs)
    model.train()
    return (preds == refs).float().mean().item(), len(refs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--width", type=int, default=40)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--resume_from", default=None)
    parser.add_argument("--output_dir", default=os.path.join(tempfile.gettempdir(), "acc_tab"))
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    set_seed(args.seed)

    train_dl = DataLoader(dataset(640, 1), batch_size=args.batch_size, shuffle=True)
    eval_dl = DataLoader(dataset(151, 2), batch_size=16)
    model = make_model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    # The prepared scheduler advances once per process at every update, so the horizon
    # is counted on the unsharded loader.
    horizon = math.ceil(len(train_dl) / args.gradient_accumulation_steps) * args.num_epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda(horizon, horizon // 10))

    model, optimizer, train_dl, eval_dl, scheduler = accelerator.prepare(
        model, optimizer, train_dl, eval_dl, scheduler)

    first_epoch = 0
    if args.resume_from:
        accelerator.load_state(args.resume_from)
        first_epoch = int(os.path.basename(args.resume_from.rstrip("/")).split("_")[-1]) + 1

    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(first_epoch, args.num_epochs):
        if hasattr(train_dl, "set_epoch"):
            train_dl.set_epoch(epoch)
        running, batches = torch.zeros(()), 0
        for x, y in train_dl:
            with accelerator.accumulate(model):
                loss = loss_fn(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            running += loss.detach()
            batches += 1
        train_loss = accelerator.reduce(running / batches, reduction="mean").item()
        acc, n = evaluate(accelerator, model, eval_dl)
        logger.info(f"epoch {epoch} train_loss {train_loss:.4f} eval_acc {acc:.4f} (n={n}) "
                    f"lr {scheduler.get_last_lr()[0]:.2e}")
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.output_dir, "final.pt"))
    accelerator.wait_for_everyone()
    time.sleep(0.5)  # let the gloo threads finish
    accelerator.end_training()


if __name__ == "__main__":
    main()
