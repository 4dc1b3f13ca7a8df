"""Data-parallel training with hand-written gradient averaging and restart drills."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build_model():
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1),
                         nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, x[:, :12].reshape(n, 3, 4).pow(2).sum(2).argmax(1))


class GradAverager:
    """Averages gradients over the group in buckets of roughly `cap` elements."""

    def __init__(self, params, cap=2048):
        self.buckets, current, size = [], [], 0
        for p in reversed([p for p in params if p.requires_grad]):
            current.append(p)
            size += p.numel()
            if size >= cap:
                self.buckets.append(current)
                current, size = [], 0
        if current:
            self.buckets.append(current)

    def __call__(self):
        pending = []
        for bucket in self.buckets:
            flat = torch.cat([p.grad.reshape(-1) for p in bucket])
            pending.append((dist.all_reduce(flat, async_op=True), flat, bucket))
        for work, flat, bucket in pending:
            work.wait()
            flat.div_(dist.get_world_size())
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad.copy_(piece.view_as(p))


def rng_state(device):
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None}


def set_rng_state(state, device):
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def save(path, epoch, model, optimizer, scheduler, device):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, rng_state(device))
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(), "rng": states}, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


@torch.no_grad()
def evaluate(model, data, device):
    model.eval()
    x, y = (t[dist.get_rank()::dist.get_world_size()].to(device) for t in data.tensors)
    logits = model(x)
    stat = torch.stack([F.cross_entropy(logits, y, reduction="sum").double(),
                        (logits.argmax(1) == y).sum().double(),
                        torch.tensor(len(y), dtype=torch.double, device=device)])
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item()


def session(args, path, stop, train, val, device):
    rank = dist.get_rank()
    torch.manual_seed(args.seed * 100 + rank)
    model = build_model().to(device)
    for t in (*model.parameters(), *model.buffers()):
        dist.broadcast(t.data, src=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    average = GradAverager(model.parameters())
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    first = 0
    if os.path.exists(path):
        state = torch.load(path, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        if len(state["rng"]) == dist.get_world_size():
            set_rng_state(state["rng"][rank], device)
        first = state["epoch"] + 1

    for epoch in range(first, stop):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            average()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        val_loss, acc = evaluate(model, val, device)
        if rank == 0:
            print(f"epoch {epoch} val_loss {val_loss:.4f} val_acc {acc:.4f}", flush=True)
        save(path, epoch, model, optimizer, scheduler, device)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--restart-after", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--seed", type=int, default=6)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")

    box = [args.out or tempfile.mkdtemp(prefix="restart_")] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    os.makedirs(box[0], exist_ok=True)
    path = os.path.join(box[0], "last.pt")
    train, val = make_data(1024, seed=1), make_data(257, seed=2)
    for stop in (args.restart_after, args.epochs):
        session(args, path, stop, train, val, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
