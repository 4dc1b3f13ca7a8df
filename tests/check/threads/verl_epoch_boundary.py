import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

PATH, EPOCHS, BATCH = "runs/sft/last.pt", 4, 64


class ResumableLoader:
    """A DataLoader that knows how many batches it has given out."""

    def __init__(self, dataset, device):
        self.dataset, self.pin = dataset, device.type == "cuda"
        self.sampler = DistributedSampler(dataset, seed=0)
        self.batch_size = BATCH // dist.get_world_size()
        self.batches_yielded = 0

    def __iter__(self):
        indices = list(self.sampler)[self.batches_yielded * self.batch_size :]
        for batch in DataLoader(Subset(self.dataset, indices), self.batch_size, num_workers=1, pin_memory=self.pin):
            self.batches_yielded += 1
            yield batch
        self.batches_yielded = 0


def save(model, optimizer, epoch, loader):
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(PATH), exist_ok=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng}
        torch.save({**state, "epoch": epoch, "batches_yielded": loader.batches_yielded}, PATH)
    dist.barrier()


def rows(n, seed):
    x = torch.randn(n, 12, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3].sum(1) > x[:, 3:6].sum(1)).long())


def fit(device, resume, stop_after):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    loader, val = ResumableLoader(rows(640, 1), device), rows(201, 2)
    steps_per_epoch = len(loader.sampler) // loader.batch_size
    model = DDP(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 2)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first, updates = 0, 0
    if resume:
        state = torch.load(PATH, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"][rank].cpu())
        loader.batches_yielded = state["batches_yielded"]
        first = state["epoch"] + (state["batches_yielded"] == steps_per_epoch)
    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            updates += 1
            if updates % steps_per_epoch == 0:
                save(model, optimizer, epoch, loader)
            if updates == stop_after:
                return
        with torch.no_grad():
            x, y = (t[rank::world].to(device) for t in val.tensors)
            counts = torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)], device=device)
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: {updates} updates in this job, accuracy {counts[0].item() / counts[1].item():.3f}")


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    fit(device, resume=False, stop_after=20)
    fit(device, resume=True, stop_after=None)
    dist.destroy_process_group()
