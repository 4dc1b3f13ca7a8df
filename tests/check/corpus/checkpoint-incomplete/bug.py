"""Train with OneCycle; `--resume` continues an interrupted run."""
import argparse
import os
import pathlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def friedman(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 10, generator=g)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return TensorDataset(x, (y[:, None] - 14) / 5)


class Checkpointer:
    def __init__(self, path, model, optimizer, scheduler, device):
        self.path = pathlib.Path(path)
        self.model, self.optimizer, self.scheduler, self.device = model, optimizer, scheduler, device

    def save(self, epoch):
        if dist.get_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": self.model.module.state_dict(), "epoch": epoch}
            torch.save(state, self.path)
        dist.barrier()

    def load(self):
        state = torch.load(self.path, map_location=self.device)
        self.model.module.load_state_dict(state["model"])
        return state["epoch"] + 1


@torch.no_grad()
def validate(net, data, device):
    net.eval()
    x, y = (t[dist.get_rank() :: dist.get_world_size()].to(device) for t in data.tensors)
    sums = torch.tensor([((net(x) - y) ** 2).sum(), len(y)], device=device)
    dist.all_reduce(sums)
    net.train()
    return (sums[0] / sums[1]).item()


def train(args, device, resume, until):
    world = dist.get_world_size()
    torch.manual_seed(args.seed)
    train_set, val_set = friedman(1024, 1), friedman(255, 2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=device.type == "cuda")
    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.epochs * len(loader))
    checkpointer = Checkpointer(args.checkpoint, model, optimizer, scheduler, device)
    start = checkpointer.load() if resume else 0
    for epoch in range(start, until):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            scheduler.step()
        checkpointer.save(epoch)
        mse = validate(net, val_set, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: val mse {mse:.4f}, lr {scheduler.get_last_lr()[0]:.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="runs/onecycle/last.ckpt")
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    train(args, device, resume=False, until=args.epochs // 2)  # the first job of the queue
    train(args, device, resume=True, until=args.epochs)  # and the second
    dist.destroy_process_group()
