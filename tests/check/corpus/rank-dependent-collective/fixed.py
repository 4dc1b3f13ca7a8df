"""Detector-like training: the box loss is normalised by the positives of all GPUs."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def scenes(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    has_object = (torch.rand(n, generator=g) < 0.06).float()
    x[:, 0] += 3 * has_object
    return TensorDataset(x, has_object, x[:, 1:5].tanh())


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU())
        self.objectness = nn.Linear(64, 1)
        self.box = nn.Linear(64, 4)

    def forward(self, x):
        h = self.body(x)
        return self.objectness(h).squeeze(1), self.box(h)


def detection_loss(outputs, has_object, boxes):
    logits, pred = outputs
    loss = F.binary_cross_entropy_with_logits(logits, has_object)
    positive = has_object > 0
    num_pos = positive.sum().float()
    dist.all_reduce(num_pos)  # also from ranks without an object
    box_loss = F.l1_loss(pred[positive], boxes[positive], reduction="sum")
    loss = loss + box_loss * dist.get_world_size() / num_pos.clamp(min=1)
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    train, val = scenes(640, 1), scenes(199, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    model = DDP(Detector().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            x, has_object, boxes = (t.to(device) for t in batch)
            optimizer.zero_grad()
            detection_loss(model(x), has_object, boxes).backward()
            optimizer.step()
        with torch.no_grad():
            x, has_object, _ = (t[rank::world].to(device) for t in val.tensors)
            hits = ((model.module(x)[0] > 0) == (has_object > 0)).sum()
        counts = torch.stack([hits, torch.tensor(len(x), device=device)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch} objectness accuracy {counts[0].item() / counts[1].item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
