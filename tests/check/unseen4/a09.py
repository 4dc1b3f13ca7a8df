"""Gradient surgery (PCGrad) for a three-task network, data parallel over gloo."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TASKS = ("digit", "parity", "ink")


class MultiTaskNet(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.heads = nn.ModuleDict({"digit": nn.Linear(hidden, 10), "parity": nn.Linear(hidden, 2), "ink": nn.Linear(hidden, 1)})

    def forward(self, x):
        h = self.trunk(x)
        return {t: self.heads[t](h) for t in TASKS}


def task_losses(out, y, ink):
    return {
        "digit": F.cross_entropy(out["digit"], y),
        "parity": F.cross_entropy(out["parity"], y % 2),
        "ink": F.mse_loss(out["ink"].squeeze(1), ink),
    }


def flatten(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten_to_grad(vec, params):
    offset = 0
    for p in params:
        p.grad = vec[offset : offset + p.numel()].view_as(p).clone()
        offset += p.numel()


def project_conflicts(grads, order_rng):
    """Yu et al. 2020: drop the component of g_i that opposes g_j."""
    merged = torch.zeros_like(grads[0])
    for i, g in enumerate(grads):
        g = g.clone()
        others = [j for j in range(len(grads)) if j != i]
        order_rng.shuffle(others)
        for j in others:
            dot = g @ grads[j]
            if dot < 0:
                g -= dot / (grads[j] @ grads[j] + 1e-12) * grads[j]
        merged += g
    return merged


class Surgeon:
    def __init__(self, model, seed):
        self.trunk = list(model.trunk.parameters())
        self.heads = {t: list(model.heads[t].parameters()) for t in TASKS}
        self.rng = random.Random(seed)
        self.world = dist.get_world_size()

    def backward(self, losses):
        shared = []
        for t in TASKS:
            params = self.trunk + self.heads[t]
            flat = flatten(torch.autograd.grad(losses[t], params, retain_graph=t != TASKS[-1]))
            dist.all_reduce(flat)
            flat /= self.world
            n_shared = sum(p.numel() for p in self.trunk)
            shared.append(flat[:n_shared])
            unflatten_to_grad(flat[n_shared:], self.heads[t])
        unflatten_to_grad(project_conflicts(shared, self.rng), self.trunk)


@torch.no_grad()
def evaluate(model, x, y, ink):
    model.eval()
    out = model(x)
    stat = torch.tensor([
        (out["digit"].argmax(1) == y).sum().item(),
        (out["parity"].argmax(1) == y % 2).sum().item(),
        (out["ink"].squeeze(1) - ink).abs().sum().item(),
        len(y),
    ], dtype=torch.float64)
    dist.all_reduce(stat)
    model.train()
    return (stat[:3] / stat[3]).tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=17)
    ap.add_argument("--out", default="./out/a09")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
    tr, va = perm[:1420], perm[1420:][rank::world]
    ink = x.mean(1)
    ink = (ink - ink[tr].mean()) / ink[tr].std()
    dataset = TensorDataset(x[tr], y[tr], ink[tr])
    sampler = DistributedSampler(dataset, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    model = MultiTaskNet()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    surgeon = Surgeon(model, args.seed)

    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(len(TASKS))
        for xb, yb, ib in loader:
            losses = task_losses(model(xb), yb, ib)
            surgeon.backward(losses)
            opt.step()
            running += torch.stack([losses[t].detach() for t in TASKS])
        dist.all_reduce(running)
        running /= world * len(loader)
        digit, parity, ink_mae = evaluate(model, x[va], y[va], ink[va])
        score = (1 - digit) + (1 - parity) + ink_mae
        if rank == 0:
            logged = " ".join(f"{t} {v:.3f}" for t, v in zip(TASKS, running.tolist()))
            print(f"epoch {epoch} {logged} | acc {digit:.4f} parity {parity:.4f} ink mae {ink_mae:.4f}", flush=True)
            if score < best:
                os.makedirs(args.out, exist_ok=True)
                torch.save(model.state_dict(), os.path.join(args.out, "best.pt"))
        best = min(best, score)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
