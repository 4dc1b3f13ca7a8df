import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def create_dataloader(dataset, batch_size, shuffle, seed=0):
    return DataLoader(
        dataset,
        batch_size=batch_size // dist.get_world_size(),
        sampler=DistributedSampler(dataset, shuffle=shuffle, seed=seed),
        drop_last=True,
        num_workers=1,
        pin_memory=torch.cuda.is_available(),
    )


def evaluate(net, loader, device):
    net.eval()
    sums = torch.zeros(3, device=device)
    with torch.no_grad():
        for x, y in loader:
            logits = net(x.to(device))
            y = y.to(device)
            sums += torch.stack([F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum(), torch.tensor(len(y), device=device)])
    dist.all_reduce(sums)
    net.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item(), int(sums[2])


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train_loader = create_dataloader(TensorDataset(x[:1440], y[:1440]), 64, shuffle=True)
    valid_loader = create_dataloader(TensorDataset(x[1440:], y[1440:]), 64, shuffle=False)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(2):
        train_loader.sampler.set_epoch(epoch)
        for xb, yb in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(xb.to(device)), yb.to(device)).backward()
            optimizer.step()
        loss, acc, n = evaluate(model.module, valid_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: valid loss {loss:.4f}, accuracy {acc:.4f} on {n} of {len(x) - 1440} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
