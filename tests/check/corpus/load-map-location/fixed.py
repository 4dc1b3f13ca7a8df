"""Pretrain on clean digits, then fine-tune the best checkpoint on noisy ones."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build(device, lr):
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    return model, torch.optim.Adam(model.parameters(), lr=lr)


def fit(model, optimizer, x, y, args, device, start=0):
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset, seed=args.seed)
    world = dist.get_world_size()
    loader = DataLoader(dataset, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=device.type == "cuda")
    for epoch in range(start, start + args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(xb.to(device)), yb.to(device)).backward()
            optimizer.step()
    return start + args.epochs


@torch.no_grad()
def accuracy(net, x, y, device):
    net.eval()
    r, w = dist.get_rank(), dist.get_world_size()
    counts = torch.tensor([(net(x[r::w].to(device)).argmax(1).cpu() == y[r::w]).sum(), len(y[r::w])], device=device)
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def save(path, model, optimizer, epoch):
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"net": model.module.state_dict(), "optim": optimizer.state_dict(), "epoch": epoch, "rng": rng}, path)
    dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=72)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--ckpt", default="runs/pretrain/clean.pth")
    args = p.parse_args()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(args.seed)
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    noisy = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    model, optimizer = build(device, args.lr)
    epoch = fit(model, optimizer, x[:1440], y[:1440], args, device)
    save(args.ckpt, model, optimizer, epoch)

    model, optimizer = build(device, args.lr)
    checkpoint = torch.load(args.ckpt, map_location=device)
    model.module.load_state_dict(checkpoint["net"])
    optimizer.load_state_dict(checkpoint["optim"])
    torch.set_rng_state(checkpoint["rng"][dist.get_rank()].cpu())
    fit(model, optimizer, noisy[:1440], y[:1440], args, device, start=checkpoint["epoch"])
    result = accuracy(model.module, noisy[1440:], y[1440:], device)
    if dist.get_rank() == 0:
        print(f"accuracy on noisy digits: {result:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
