"""Builds the model on the meta device (no double memory for big models), then materializes it."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def materialize(model, device):
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def configure_optimizer(model, lr, weight_decay):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}], lr=lr)


def train(model, optimizer, loader, device):
    model.train()
    total = torch.zeros((), device=device)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


@torch.no_grad()
def test(net, x, y, device):
    net.eval()
    r, w = dist.get_rank(), dist.get_world_size()
    counts = torch.tensor([(net(x[r::w].to(device)).argmax(1).cpu() == y[r::w]).sum(), len(y[r::w])], device=device)
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--wd", type=float, default=0.01)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(0)

    with torch.device("meta"):
        net = build_model()
    net = materialize(net, device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = configure_optimizer(model, args.lr, args.wd)

    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train_set = TensorDataset(x[:1408], y[:1408])
    sampler = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=cuda)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train(model, optimizer, loader, device)
        acc = test(net, x[1408:], y[1408:], device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: train loss {loss:.3f}, test accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
