"""DDP with a half-precision gradient hook, sharded optimizer state and agreed-on step skipping."""
import argparse
import logging
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("zero")


def sensor_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, 32, generator=g)
    freq = torch.rand(n, 1, 1, generator=g) * 2
    x = x * 0.4 + torch.sin(freq * torch.arange(32).view(1, 1, 32))
    return TensorDataset(x, freq.view(n, 1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Conv1d(6, 16, 5, 2), nn.ReLU(), nn.Conv1d(16, 16, 5, 2), nn.ReLU(), nn.Flatten(),
                               nn.Linear(80, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.f(x)


def everyone_ok(ok):
    t = torch.tensor(1 if ok else 0)
    dist.all_reduce(t, op=dist.ReduceOp.MIN)
    return bool(t.item())


def train_step(model, opt, x, y, max_norm):
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    if not everyone_ok(bool(torch.isfinite(loss))):
        return loss.detach(), False
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not torch.isfinite(norm):
        return loss.detach(), False
    opt.step()
    return loss.detach(), True


def evaluate(net, data, rank, world):
    x, y = (t[rank::world] for t in data.tensors)
    net.eval()
    with torch.no_grad():
        s = torch.tensor([(net(x) - y).abs().sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(s)
    net.train()
    return (s[0] / s[1]).item()


def save(path, epoch, model, opt):
    opt.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch, "model": model.module.state_dict(), "opt": opt.state_dict()}, path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--max-norm", type=float, default=2.0)
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--path", default=os.path.join(tempfile.gettempdir(), "sensor_zero.pt"))
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(24)
    model = DDP(Net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=args.lr)

    start = 0
    if args.resume and os.path.exists(args.path):
        ck = torch.load(args.path, map_location="cpu")
        model.module.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        start = ck["epoch"] + 1

    train, val = sensor_data(384, 1), sensor_data(90, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True)
    loader = DataLoader(train, args.batch, sampler=sampler)
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        s = torch.zeros(3)
        for x, y in loader:
            loss, stepped = train_step(model, opt, x, y, args.max_norm)
            if stepped:
                s[:2] += torch.tensor([loss.item() * len(y), len(y)])
            else:
                s[2] += 1
        dist.all_reduce(s)
        log.info("epoch %d mse %.4f val mae %.4f skipped %d", epoch, s[0] / s[1],
                 evaluate(model.module, val, rank, world), int(s[2]) // world)
        save(args.path, epoch, model, opt)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
