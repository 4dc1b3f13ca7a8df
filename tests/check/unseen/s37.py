"""Regression with an EMA copy; the job is split into two chunks as on a preemptible queue."""
import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, CHUNK, BATCH = 6, 3, 25


class EMA:
    def __init__(self, model, decay=0.98):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - self.decay)


def data():
    g = torch.Generator().manual_seed(21)
    x = torch.rand(1200, 6, generator=g) * 4 - 2
    y = torch.sin(x[:, :1]) * x[:, 1:2] + 0.3 * x[:, 2:3] ** 2 + 0.05 * torch.randn(1200, 1, generator=g)
    return TensorDataset(x[:1000], y[:1000]), TensorDataset(x[1000:], y[1000:])


def build(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS)
    return net, opt, sched


def save(path, net, ema, opt, sched, epoch):
    if dist.get_rank() == 0:
        state = {"net": net.state_dict(), "ema": ema.shadow.state_dict(), "opt": opt.state_dict(),
                 "sched": sched.state_dict(), "epoch": epoch}
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


@torch.no_grad()
def rmse(model, ds, device):
    r, w = dist.get_rank(), dist.get_world_size()
    x, y = (t[r::w].to(device) for t in ds.tensors)
    s = torch.stack([(model(x) - y).pow(2).sum(), torch.tensor(float(len(y)), device=device)])
    dist.all_reduce(s)
    return (s[0] / s[1]).sqrt().item()


def run_chunk(path, stop, device, local):
    train, val = data()
    net, opt, sched = build(device)
    ema = EMA(net)
    start = 0
    if os.path.exists(path):
        ck = torch.load(path, map_location=device)
        net.load_state_dict(ck["net"])
        ema.shadow.load_state_dict(ck["ema"])
        opt.load_state_dict(ck["opt"])
        sched.load_state_dict(ck["sched"])
        start = ck["epoch"] + 1
    model = DDP(net, device_ids=[local] if device.type == "cuda" else None)
    sampler = DistributedSampler(train, seed=5)
    loader = DataLoader(train, BATCH, sampler=sampler)
    for epoch in range(start, stop):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.smooth_l1_loss(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update(net)
        sched.step()
        raw, avg = rmse(net, val, device), rmse(ema.shadow, val, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} rmse {raw:.4f} ema {avg:.4f}")
        save(path, net, ema, opt, sched, epoch)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    path = os.path.join(box[0], "last.pt")
    for stop in range(CHUNK, EPOCHS + 1, CHUNK):
        run_chunk(path, stop, device, local)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
