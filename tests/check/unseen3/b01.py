"""Tabular classifier, DDP, macro-F1 early stopping."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

NUM_CLASSES = 5


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=12)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--patience", type=int, default=3)
    p.add_argument("--seed", type=int, default=17)
    p.add_argument("--out", default=None)
    return p.parse_args()


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(NUM_CLASSES, 16, generator=torch.Generator().manual_seed(1))
    y = torch.randint(0, NUM_CLASSES, (n,), generator=g)
    x = centers[y] + 1.2 * torch.randn(n, 16, generator=g)
    return TensorDataset(x, y)


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(),
        )
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


@torch.no_grad()
def evaluate(ddp, loader, device):
    net = ddp.module
    for buf in net.buffers():
        dist.broadcast(buf, src=0)
    net.eval()
    conf = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.long, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        pred = net(x).argmax(1)
        conf += torch.bincount(y * NUM_CLASSES + pred, minlength=NUM_CLASSES**2).view_as(conf)
    net.train()
    dist.all_reduce(conf)
    conf = conf.double()
    tp = conf.diag()
    f1 = 2 * tp / (conf.sum(0) + conf.sum(1)).clamp(min=1)
    return f1.mean().item(), (tp.sum() / conf.sum()).item(), int(conf.sum().item())


def main():
    args = parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    out = [args.out or tempfile.mkdtemp(prefix="f1_")]
    dist.broadcast_object_list(out, src=0)
    out = out[0]
    os.makedirs(out, exist_ok=True)
    best_path = os.path.join(out, "best.pt")

    train_set = make_data(1024, seed=100)
    val_set = make_data(333, seed=200)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True,
                                 seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=64)

    torch.manual_seed(args.seed)
    net = Net().to(device)
    ddp = DDP(net, device_ids=[local_rank] if device.type == "cuda" else None)
    torch.manual_seed(args.seed + 1000 + rank)
    opt = torch.optim.AdamW(ddp.parameters(), lr=args.lr, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs * len(train_loader))

    best, bad = -1.0, 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2, device=device)
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            loss = F.cross_entropy(ddp(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            running += torch.stack([loss.detach(), loss.new_ones(())])
        dist.all_reduce(running)
        f1, acc, n = evaluate(ddp, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} loss {running[0] / running[1]:.4f} f1 {f1:.4f} acc {acc:.4f} n={n}")
        if f1 > best + 1e-4:
            best, bad = f1, 0
            if rank == 0:
                torch.save({"model": net.state_dict(), "epoch": epoch, "f1": f1}, best_path)
        else:
            bad += 1
            if bad > args.patience:
                break

    dist.barrier()
    state = torch.load(best_path, map_location=device, weights_only=True)
    net.load_state_dict(state["model"])
    f1, acc, _ = evaluate(ddp, val_loader, device)
    if rank == 0:
        print(f"best epoch {state['epoch']}: f1 {f1:.4f} acc {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
