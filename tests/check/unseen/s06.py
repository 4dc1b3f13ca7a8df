"""
Language-model-ish next-token training which survives preemption: the queue gives us
slots of --slot epochs, every slot starts from the last checkpoint.
"""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--slot", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--workdir", default=None)
    return ap.parse_args()


class NextToken(nn.Module):
    def __init__(self, vocab=32, dim=32, ctx=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim * ctx, 96), nn.GELU(), nn.Linear(96, vocab))

    def forward(self, ids):
        return self.mlp(self.emb(ids).flatten(1))


def corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (n, 4), generator=g)
    return ids, (3 * ids[:, 3] + (ids[:, 0] > 15)) % 32


def save_checkpoint(path, model, scheduler, epoch):
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "scheduler": scheduler.state_dict(), "epoch": epoch}, path)
    dist.barrier()


def load_checkpoint(path, net, scheduler, device):
    if not os.path.exists(path):
        return 0
    ck = torch.load(path, map_location=device)
    net.load_state_dict(ck["model"])
    scheduler.load_state_dict(ck["scheduler"])
    return ck["epoch"] + 1


def run_slot(args, path, device, local_rank, n_epochs):
    rank, world = dist.get_rank(), dist.get_world_size()
    ds = TensorDataset(*corpus(2048, 0))
    sampler = DistributedSampler(ds, shuffle=True, seed=0)
    loader = DataLoader(ds, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    vx, vy = (t[rank::world].to(device) for t in corpus(400, 1))

    torch.manual_seed(0)
    net = NextToken().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    start = load_checkpoint(path, net, scheduler, device)
    for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr()):
        group["lr"] = lr
    model = DDP(net, device_ids=[local_rank] if device.type == "cuda" else None)

    for epoch in range(start, min(start + n_epochs, args.epochs)):
        sampler.set_epoch(epoch)
        model.train()
        for ids, target in loader:
            ids, target = ids.to(device), target.to(device)
            loss = F.cross_entropy(model(ids), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            s = torch.stack([F.cross_entropy(net(vx), vy, reduction="sum"), torch.tensor(float(len(vy)), device=device)])
        dist.all_reduce(s)
        if rank == 0:
            print(f"epoch {epoch} val loss {s[0] / s[1]:.4f} lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
        save_checkpoint(path, model, scheduler, epoch)
    return min(start + n_epochs, args.epochs)


def main():
    args = get_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")

    where = [args.workdir or tempfile.mkdtemp(prefix="slots_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    path = os.path.join(where[0], "checkpoint.pt")
    done = 0
    while done < args.epochs:
        done = run_slot(args, path, device, local_rank, args.slot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
