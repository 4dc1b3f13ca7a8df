"""MLP on tabular data; evaluation on one process, early stopping, plateau schedule."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def table(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 14, generator=g) * torch.logspace(-1, 1, 14)
    z = x / torch.logspace(-1, 1, 14)
    y = ((z[:, 0] * z[:, 1] + z[:, 2].abs() - 0.8 + 0.3 * torch.randn(n, generator=g)) > 0).float()
    return x, y


class Tabular(nn.Module):
    def __init__(self, mean, std, width=64):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.body = nn.Sequential(nn.Linear(14, width), nn.ReLU(), nn.Dropout(0.1),
                                  nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.body((x - self.mean) / self.std).squeeze(-1)


def epoch_batches(n, batch_size, epoch, seed, rank, world):
    g = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(n, generator=g)
    order = order[: n - n % (world * batch_size)]
    yield from order[rank::world].split(batch_size)


@torch.no_grad()
def evaluate(net, x, y, batch_size=128):
    net.eval()
    loss = hits = 0.0
    for bx, by in zip(x.split(batch_size), y.split(batch_size)):
        logits = net(bx)
        loss += F.binary_cross_entropy_with_logits(logits, by, reduction="sum").item()
        hits += ((logits > 0) == (by > 0)).sum().item()
    net.train()
    return loss / len(y), hits / len(y)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=12)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--patience", type=int, default=3)
    p.add_argument("--seed", type=int, default=40)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    x, y = (t.to(device) for t in table(1500, seed=1))
    torch.manual_seed(args.seed)
    net = Tabular(x.mean(0), x.std(0)).to(device)
    ddp = DDP(net, device_ids=[local] if cuda else None)
    torch.manual_seed(args.seed + 1 + rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)

    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="tabular_")
        os.makedirs(out, exist_ok=True)
        val_x, val_y = (t.to(device) for t in table(400, seed=2))

    best, bad = float("inf"), 0
    for epoch in range(args.epochs):
        total, count = torch.zeros((), device=device), 0
        for idx in epoch_batches(len(x), args.batch_size, epoch, args.seed, rank, world):
            loss = F.binary_cross_entropy_with_logits(ddp(x[idx]), y[idx])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            count += 1
        dist.all_reduce(total)

        result = torch.zeros(2, dtype=torch.float64, device=device)
        if rank == 0:
            result.copy_(torch.tensor(evaluate(net, val_x, val_y), dtype=torch.float64))
        dist.broadcast(result, src=0)
        val_loss, val_acc = result.tolist()
        scheduler.step(val_loss)

        improved = val_loss < best
        best, bad = (val_loss, 0) if improved else (best, bad + 1)
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / world / count:.4f} val {val_loss:.4f} acc {val_acc:.4f} "
                  f"lr {optimizer.param_groups[0]['lr']:.4f}", flush=True)
            if improved:
                torch.save({"epoch": epoch, "model": net.state_dict(), "val_loss": val_loss},
                           os.path.join(out, "best.pt"))
        if bad >= args.patience:
            break

    if rank == 0:
        print(f"best val loss {best:.4f}, saved in {out}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
