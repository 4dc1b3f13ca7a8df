"""Set-transformer style regression with Accelerate: cosine schedule with warmup."""
import argparse
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


class PointSets(Dataset):
    """Predict three statistics of a 2-d point cloud."""

    def __init__(self, n, points, seed):
        g = torch.Generator().manual_seed(seed)
        centre = torch.randn(n, 1, 2, generator=g)
        scale = 0.3 + torch.rand(n, 1, 2, generator=g)
        self.x = centre + scale * torch.randn(n, points, 2, generator=g)
        radius = self.x.norm(dim=-1)
        self.y = torch.stack([radius.mean(1), radius.amax(1), (self.x[..., 0] * self.x[..., 1]).mean(1)], dim=1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"points": self.x[i], "target": self.y[i]}


class SetEncoder(nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(2, dim), nn.GELU(), nn.Linear(dim, dim))
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Sequential(nn.Linear(2 * dim, dim), nn.GELU(), nn.Linear(dim, 3))

    def forward(self, points):
        h = self.inp(points)
        h = self.norm(h + self.attn(h, h, h, need_weights=False)[0])
        return self.out(torch.cat([h.mean(1), h.amax(1)], dim=-1))


def cosine_with_warmup(optimizer, num_warmup_steps, num_training_steps, floor=0.0):
    def lr_lambda(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, lr_lambda)


def decay_groups(model, weight_decay):
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    rest = [p for n, p in model.named_parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    err = torch.zeros(3, dtype=torch.float64)
    n = 0
    for batch in loader:
        pred = model(batch["points"])
        pred, target = accelerator.gather_for_metrics((pred, batch["target"]))
        err += (pred - target).pow(2).sum(0)
        n += len(target)
    model.train()
    return (err / n).sqrt().tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--num_epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--gradient_accumulation_steps", type=int, default=1)
    ap.add_argument("--learning_rate", type=float, default=3e-3)
    ap.add_argument("--weight_decay", type=float, default=0.05)
    ap.add_argument("--warmup_ratio", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=33)
    ap.add_argument("--output_dir", default="./out/a18")
    args = ap.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    train_loader = DataLoader(PointSets(1600, 16, seed=1), batch_size=args.batch_size, shuffle=True)
    eval_loader = DataLoader(PointSets(333, 16, seed=2), batch_size=64)
    model = SetEncoder()
    optimizer = torch.optim.AdamW(decay_groups(model, args.weight_decay), lr=args.learning_rate)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    updates_per_epoch = math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_epochs * updates_per_epoch
    scheduler = cosine_with_warmup(optimizer, int(args.warmup_ratio * max_train_steps), max_train_steps)
    scheduler = accelerator.prepare(scheduler)

    step = 0
    for epoch in range(args.num_epochs):
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = F.smooth_l1_loss(model(batch["points"]), batch["target"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    step += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        rmse = evaluate(accelerator, model, eval_loader)
        shown = " ".join(f"{v:.4f}" for v in rmse)
        train_loss = accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"epoch {epoch} step {step}/{max_train_steps} loss {train_loss:.4f} rmse {shown}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.output_dir, "model.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
