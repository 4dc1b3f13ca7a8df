"""Train on .npy files that every process has unpacked into its own scratch folder."""
import argparse
import os
import random
import shutil
import tempfile
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def unpack(n_files, rank):
    """Stand-in for the download onto the node's local disk, in the order of arrival."""
    folder = tempfile.mkdtemp(prefix="scratch_")
    ids = list(range(n_files))
    random.Random(rank).shuffle(ids)
    for i in ids:
        rng = np.random.default_rng(i)
        label = i % 5
        sample = rng.normal(size=24) + np.eye(5, 24)[label] * 3
        np.save(os.path.join(folder, f"{label}_{i:05d}.npy"), sample.astype(np.float32))
    return folder


class NpyFolder(Dataset):
    def __init__(self, root):
        self.root = root
        self.files = sorted(os.listdir(root))
        self.labels = [int(name.split("_")[0]) for name in self.files]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        x = np.load(os.path.join(self.root, self.files[index]))
        return torch.from_numpy(x), self.labels[index]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x):
        return self.layers(x)


def accuracy(model, n, device):
    """On fresh samples, each rank a part of them."""
    label = np.arange(n) % 5
    x = np.random.default_rng(10_000).normal(size=(n, 24)) + np.eye(5, 24)[label] * 3
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        pred = model(torch.tensor(x[mine], dtype=torch.float32, device=device)).argmax(1)
    hits = pred == torch.from_numpy(label[mine]).to(device)
    counts = torch.stack([hits.sum(), torch.tensor(len(hits), device=device)])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=640)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(minutes=10))
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
    torch.manual_seed(0)

    root = unpack(args.files, dist.get_rank())
    dataset = NpyFolder(root)
    sampler = DistributedSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(dataset, args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=2, pin_memory=use_cuda)
    model = DDP(Classifier().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        acc = accuracy(model.module, 201, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: test accuracy {acc:.3f}")
    shutil.rmtree(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
