import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATH, STEPS, SAVE_EVERY = "runs/forge/last.pt", 60, 15


class CheckpointManager:
    def __init__(self, model, optimizer, device):
        self.model, self.optimizer, self.device = model, optimizer, device

    def save(self, step, scheduler):
        rng = [None] * dist.get_world_size()
        dist.all_gather_object(rng, torch.get_rng_state())
        if dist.get_rank() == 0:
            os.makedirs(os.path.dirname(PATH), exist_ok=True)
            state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**state, "scheduler": scheduler.state_dict(), "step": step, "rng": rng}, PATH)
        dist.barrier()

    def load(self, scheduler):
        state = torch.load(PATH, map_location=self.device)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"][dist.get_rank()].cpu())
        return state["step"]


def rows(n, seed):
    x = torch.randn(n, 10, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.abs().sum(1, keepdim=True))


def train(device, resume, until):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset, val = rows(1280, 1), rows(201, 2)
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, 64 // world, sampler=sampler, num_workers=1, pin_memory=device.type == "cuda")
    model = DDP(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    checkpoints = CheckpointManager(model, optimizer, device)
    step = checkpoints.load(scheduler) if resume else 0
    epoch = 0
    while step < until:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % SAVE_EVERY == 0:
                checkpoints.save(step, scheduler)
            if step == until:
                break
        epoch += 1
        with torch.no_grad():
            x, y = (t[rank::world].to(device) for t in val.tensors)
            sums = torch.stack([F.mse_loss(model.module(x), y, reduction="sum"), torch.tensor(float(len(y)), device=device)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"step {step}: val mse {(sums[0] / sums[1]).item():.4f}")


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    train(device, resume=False, until=STEPS // 2)
    train(device, resume=True, until=STEPS)
    dist.destroy_process_group()
