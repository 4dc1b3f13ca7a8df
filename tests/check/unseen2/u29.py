"""Two-stage fine-tuning: new head on frozen trunk, then the whole network. The DDP wrapper and the
optimizer are rebuilt for the second stage."""
import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trunk(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(18, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU())


class Net(nn.Module):
    def __init__(self, trunk, classes):
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.trunk(x))


def blobs(n, classes, seed):
    g = torch.Generator().manual_seed(seed)
    mu = 1.2 * torch.randn(classes, 18, generator=torch.Generator().manual_seed(classes))
    y = torch.randint(0, classes, (n,), generator=g)
    return TensorDataset(mu[y] + torch.randn(n, 18, generator=g), y)


class Job:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def log(self, msg):
        if self.rank == 0:
            print(msg, flush=True)

    def fit(self, net, data, epochs, lr, tag, val=None):
        params = [p for p in net.parameters() if p.requires_grad]
        model = DDP(net)
        opt = torch.optim.AdamW(params, lr=lr)
        sampler = DistributedSampler(data, self.world, self.rank, shuffle=True, seed=len(tag))
        loader = DataLoader(data, self.args.batch, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            model.train()
            s = torch.zeros(2)
            for x, y in loader:
                opt.zero_grad(set_to_none=True)
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                opt.step()
                s += torch.tensor([loss.item() * len(y), len(y)])
            dist.all_reduce(s)
            acc = self.accuracy(net, val) if val is not None else float("nan")
            self.log(f"[{tag}] epoch {epoch} loss {s[0] / s[1]:.4f} acc {acc:.3f}")
        return net

    @torch.no_grad()
    def accuracy(self, net, data):
        net.eval()
        x, y = (t[self.rank::self.world] for t in data.tensors)
        c = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
        dist.all_reduce(c)
        return (c[0] / c[1]).item()

    def pretrain(self):
        path = self.args.trunk
        net = self.fit(Net(Trunk(), 8), blobs(480, 8, 1), 1, 5e-3, "pretrain")
        if self.rank == 0:
            torch.save(net.trunk.state_dict(), path)
        dist.barrier()
        return path

    def finetune(self, path):
        trunk = Trunk()
        trunk.load_state_dict(torch.load(path, map_location="cpu"))
        net = Net(trunk, 3)
        train, val = blobs(360, 3, 2), blobs(99, 3, 3)
        trunk.requires_grad_(False)
        self.fit(net, train, self.args.head_epochs, 1e-2, "head", val)
        trunk.requires_grad_(True)
        self.fit(net, train, self.args.full_epochs, 2e-3, "full", val)
        if self.rank == 0:
            torch.save(net.state_dict(), self.args.out)
        dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    tmp = tempfile.gettempdir()
    ap.add_argument("--batch", type=int, default=15)
    ap.add_argument("--head-epochs", type=int, default=1)
    ap.add_argument("--full-epochs", type=int, default=2)
    ap.add_argument("--trunk", default=os.path.join(tmp, "two_stage_trunk.pt"))
    ap.add_argument("--out", default=os.path.join(tmp, "two_stage_net.pt"))
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(16)
    job = Job(args)
    job.finetune(job.pretrain())
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
