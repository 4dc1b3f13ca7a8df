"""Toy denoising diffusion on 2-D points, trained with Accelerate and EMA weights."""
import argparse
import copy
import math
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader, TensorDataset

T = 100


class EMA:
    def __init__(self, model, decay=0.98):
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def step(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p.detach(), 1 - self.decay)

    def state_dict(self):
        return self.shadow.state_dict()

    def load_state_dict(self, sd):
        self.shadow.load_state_dict(sd)


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inp = nn.Linear(2, width)
        self.net = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.net(self.inp(x) + self.time(t))


def two_moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    a = math.pi * torch.rand(n, generator=g)
    flip = (torch.rand(n, generator=g) < 0.5).float()
    x = torch.stack([a.cos() * (1 - 2 * flip) + flip, a.sin() * (1 - 2 * flip) + 0.3 * flip], 1)
    return TensorDataset(x + 0.05 * torch.randn(n, 2, generator=g), torch.arange(n))


def corrupt(x, t, noise, abar):
    a = abar[t].unsqueeze(1)
    return a.sqrt() * x + (1 - a).sqrt() * noise


@torch.no_grad()
def evaluate(accelerator, net, loader, abar, seed):
    per_sample = []
    for x, index in loader:
        noise, t = [], []
        for i in index.tolist():
            g = torch.Generator().manual_seed(seed * 100_003 + i)
            noise.append(torch.randn(2, generator=g))
            t.append(torch.randint(0, T, (), generator=g))
        noise, t = torch.stack(noise).to(x.device), torch.stack(t).to(x.device)
        err = F.mse_loss(net(corrupt(x, t, noise, abar), t), noise, reduction="none").mean(1)
        per_sample.append(accelerator.gather_for_metrics(err))
    per_sample = torch.cat(per_sample)
    return per_sample.mean().item(), len(per_sample)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--max_train_steps", type=int, default=80)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--gradient_accumulation_steps", type=int, default=2)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--warmup_steps", type=int, default=8)
    ap.add_argument("--seed", type=int, default=11)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps,
                              cpu=not torch.cuda.is_available())
    out = [args.out or tempfile.mkdtemp(prefix="ddpm_") if accelerator.is_main_process else None]
    out = broadcast_object_list(out)[0]
    set_seed(args.seed, device_specific=True)

    net = Denoiser()
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    total = args.max_train_steps * accelerator.num_processes
    warmup = args.warmup_steps * accelerator.num_processes

    def schedule(s):
        if s < warmup:
            return (s + 1) / (warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (s - warmup) / max(1, total - warmup))))

    sched = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    train_loader = DataLoader(two_moons(2048, 1), batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(two_moons(301, 2), batch_size=64)
    net, opt, train_loader, val_loader, sched = accelerator.prepare(net, opt, train_loader, val_loader, sched)
    ema = EMA(accelerator.unwrap_model(net))
    accelerator.register_for_checkpointing(ema)
    abar = torch.cumprod(1 - torch.linspace(1e-3, 0.06, T), 0).to(accelerator.device)

    updates_per_epoch = math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    epochs = math.ceil(args.max_train_steps / updates_per_epoch)
    step, window = 0, 0.0
    for epoch in range(epochs):
        for x, _ in train_loader:
            with accelerator.accumulate(net):
                t = torch.randint(0, T, (len(x),), device=x.device)
                noise = torch.randn_like(x)
                loss = F.mse_loss(net(corrupt(x, t, noise, abar), t), noise)
                window += accelerator.gather(loss.detach().repeat(len(x))).mean().item()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            if accelerator.sync_gradients:
                ema.step(accelerator.unwrap_model(net))
                step += 1
                if step % 20 == 0:
                    accelerator.print(f"step {step} loss {window / args.gradient_accumulation_steps:.4f} "
                                      f"lr {sched.get_last_lr()[0]:.2e}")
                window = 0.0
                if step >= args.max_train_steps:
                    break
        val, n = evaluate(accelerator, ema.shadow, val_loader, abar, args.seed)
        accelerator.print(f"epoch {epoch} ema val {val:.4f} on {n}")
        accelerator.save_state(os.path.join(out, "state"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
