import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

ACCUM_STEPS = 4
EPOCHS = 4
SEED = 0


class GRUTagger(nn.Module):
    """Says for each position whether the running sum of the inputs is positive."""

    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x):
        h, _ = self.rnn(x.unsqueeze(-1))
        return self.out(h)


def synth(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    return x, (x.cumsum(1) > 0).long()


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    x, y = synth(2048, SEED)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, shuffle=True, seed=SEED)
    loader = DataLoader(ds, batch_size=16, sampler=sampler, drop_last=True)
    assert len(loader) % ACCUM_STEPS == 0

    torch.manual_seed(SEED)
    model = DDP(GRUTagger().to(device), device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()

    vx, vy = synth(301, SEED + 1)
    vx, vy = vx[rank::world].to(device), vy[rank::world].to(device)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        optimizer.zero_grad()
        for step, (xb, yb) in enumerate(loader):
            xb, yb = xb.to(device), yb.to(device)
            sync_now = step % ACCUM_STEPS == 0
            with nullcontext() if sync_now else model.no_sync():
                logits = model(xb)
                loss = criterion(logits.flatten(0, 1), yb.flatten()) / ACCUM_STEPS
                loss.backward()
            if (step + 1) % ACCUM_STEPS == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        model.eval()
        with torch.no_grad():
            hits = (model.module(vx).argmax(-1) == vy).sum().float()
        counts = torch.stack([hits, torch.tensor(float(vy.numel()), device=device)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch} token accuracy {counts[0] / counts[1]:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
