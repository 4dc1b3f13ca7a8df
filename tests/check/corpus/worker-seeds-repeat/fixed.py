import argparse
import datetime
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEED = 2024


class AugmentedDigits(Dataset):
    def __init__(self, images, targets, augment):
        self.images, self.targets, self.augment = images, targets, augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        img = self.images[idx]
        if self.augment:
            img = np.roll(img, np.random.randint(-1, 2, size=2), axis=(0, 1))
            img = img + np.random.normal(0, 0.1, img.shape)
        return torch.from_numpy(img.astype(np.float32)).unsqueeze(0), int(self.targets[idx])


def seed_worker(worker_id):
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


def get_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=80)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(SEED)
    model = DDP(get_model().to(device), gradient_as_bucket_view=True)
    torch.manual_seed(SEED + rank)  # workers draw other numbers on every rank

    digits = load_digits()
    images = digits.images / 16
    train_set = AugmentedDigits(images[:1440], digits.target[:1440], augment=True)
    test_set = AugmentedDigits(images[1440 + rank :: world], digits.target[1440 + rank :: world], augment=False)
    sampler = DistributedSampler(train_set, seed=SEED)
    loader = DataLoader(
        train_set, batch_size=args.batch_size // world, sampler=sampler,
        num_workers=args.workers, worker_init_fn=seed_worker, pin_memory=cuda,
    )
    test_loader = DataLoader(test_set, batch_size=100, num_workers=1, pin_memory=cuda)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for img, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(img.to(device)), target.to(device))
            loss.backward()
            optimizer.step()

        model.eval()
        result = torch.zeros(2, device=device)
        with torch.no_grad():
            for img, target in test_loader:
                pred = model.module(img.to(device)).argmax(1)
                result[0] += (pred == target.to(device)).sum()
                result[1] += len(target)
        dist.all_reduce(result)
        if rank == 0:
            print(f"epoch {epoch}: test accuracy {(result[0] / result[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
