import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_classification
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def init() -> tuple[int, int, torch.device]:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda", local) if cuda else torch.device("cpu")


def build_dataset() -> TensorDataset:
    X, y = make_classification(n_samples=2000, n_features=30, n_informative=10, n_redundant=5,
                               n_classes=3, class_sep=0.8, random_state=77)
    return TensorDataset(torch.tensor(X, dtype=torch.float32), torch.tensor(y, dtype=torch.long))


def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    model.eval()
    agg = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            out = model(x)
            agg[0] += nn.functional.cross_entropy(out, y, reduction="sum")
            agg[1] += (out.argmax(1) == y).sum()
            agg[2] += y.numel()
    dist.all_reduce(agg)
    return (agg[0] / agg[2]).item(), (agg[1] / agg[2]).item()


def main() -> None:
    rank, world, device = init()
    seed_everything(1234 + rank)

    dataset = build_dataset()
    n_val = 400
    train_set, val_set = random_split(dataset, [len(dataset) - n_val, n_val])

    train_sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True, seed=1234)
    val_sampler = DistributedSampler(val_set, num_replicas=world, rank=rank, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=40, sampler=train_sampler, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=100, sampler=val_sampler)

    net = nn.Sequential(
        nn.Linear(30, 128), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(64, 3),
    ).to(device)
    model = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    epochs = 5
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(train_loader))

    for epoch in range(epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        loss, acc = evaluate(net, val_loader, device)
        if rank == 0:
            print(f"epoch={epoch} val_loss={loss:.4f} val_acc={acc:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
