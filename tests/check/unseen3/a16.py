import argparse
import logging
import os
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
logger = get_logger(__name__)


class Denoiser(nn.Module):
    def __init__(self, d=16, width=96):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
                                 nn.Linear(width, d))

    def forward(self, x, sigma):
        return self.net(torch.cat([x, sigma.log()], dim=1))


def low_rank(n, seed, d=16, rank=3):
    basis = torch.randn(rank, d, generator=torch.Generator().manual_seed(50))
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, rank, generator=g) @ basis)


def denoise_error(model, x):
    sigma = torch.exp(torch.randn(len(x), 1, device=x.device) * 0.6 - 0.5)
    restored = model(x + sigma * torch.randn_like(x), sigma)
    return (restored - x).pow(2).mean(1)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    errors = [accelerator.gather_for_metrics(denoise_error(model, x)) for (x,) in loader]
    model.train()
    return torch.cat(errors).mean().item()


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--max-steps", type=int, default=160)
    p.add_argument("--max-minutes", type=float, default=55.0, help="wall-clock budget of the job")
    p.add_argument("--eval-every", type=int, default=40)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=19)
    p.add_argument("--out", default=None)
    return p.parse_args()


def main():
    args = parse_args()
    deadline = time.monotonic() + 60.0 * args.max_minutes
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(args.seed)

    train_loader = DataLoader(low_rank(1280, seed=1), batch_size=args.batch_size, shuffle=True, drop_last=True,
                              generator=torch.Generator().manual_seed(args.seed))
    val_loader = DataLoader(low_rank(210, seed=2), batch_size=32)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    set_seed(args.seed, device_specific=True)

    step, epoch, done = 0, 0, False
    while not done:
        train_loader.set_epoch(epoch)
        for (x,) in train_loader:
            loss = denoise_error(model, x).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.eval_every == 0:
                train_loss = accelerator.reduce(loss.detach(), reduction="mean").item()
                val = evaluate(accelerator, model, val_loader)
                logger.info("step %d train %.4f val %.4f", step, train_loss, val)
            if step >= args.max_steps:
                done = True
                break
            if time.monotonic() > deadline:
                logger.info("time budget used up at step %d", step)
                done = True
                break
        epoch += 1

    final = evaluate(accelerator, model, val_loader)
    logger.info("finished after %d steps, validation error %.4f", step, final)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        out = args.out or tempfile.mkdtemp(prefix="denoiser_")
        os.makedirs(out, exist_ok=True)
        accelerator.save({"model": accelerator.unwrap_model(model).state_dict(), "step": step},
                         os.path.join(out, "denoiser.pt"))
        logger.info("saved %s", out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
