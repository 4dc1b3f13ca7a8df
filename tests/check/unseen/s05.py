"""Mixed precision text classification (bag of tokens) under DDP."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, LEN, CLASSES = 200, 20, 4


class Topics(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, CLASSES, (n,), generator=g)
        topic = torch.randint(0, VOCAB // CLASSES, (n, LEN), generator=g) + self.label[:, None] * (VOCAB // CLASSES)
        noise = torch.randint(0, VOCAB, (n, LEN), generator=g)
        keep = torch.rand(n, LEN, generator=g) < 0.35
        self.ids = torch.where(keep, topic, noise)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.ids[i], self.label[i]


class BagNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.fc = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, ids):
        return self.fc(self.emb(ids))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--max-norm", type=float, default=1.0)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")

    train, val = Topics(1600, 0), Topics(250, 1)
    sampler = DistributedSampler(train, shuffle=True, seed=0)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True, pin_memory=cuda)

    torch.manual_seed(0)
    model = DDP(BagNet().to(device), device_ids=[local] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0 ** 12)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for ids, label in loader:
            ids, label = ids.to(device, non_blocking=True), label.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type=device.type, dtype=torch.float16):
                loss = criterion(model(ids), label)
            scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            scaler.step(optimizer)
            scaler.update()

        model.eval()
        stat = torch.zeros(2, device=device)
        with torch.no_grad():
            ids, label = val.ids[rank::world].to(device), val.label[rank::world].to(device)
            stat[0] = (model.module(ids).argmax(1) == label).sum()
            stat[1] = len(label)
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} val acc {(stat[0] / stat[1]).item():.4f} scale {scaler.get_scale()}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
