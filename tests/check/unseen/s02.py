import os
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from sklearn.datasets import make_regression
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    epochs: int = 4
    batch_size: int = 16
    accum: int = 2
    lr: float = 3e-3
    width: int = 64
    depth: int = 3
    seed: int = 9


class ResBlock(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(w), nn.Linear(w, w), nn.Linear(w, w)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(self.norm(x))))


class TabNet(nn.Module):
    def __init__(self, d_in, w, depth):
        super().__init__()
        self.inp = nn.Linear(d_in, w)
        self.blocks = nn.Sequential(*[ResBlock(w) for _ in range(depth)])
        self.out = nn.Linear(w, 1)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x))).squeeze(-1)


def build(cfg, device, mesh):
    torch.manual_seed(cfg.seed)
    model = TabNet(20, cfg.width, cfg.depth).to(device)
    mp = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh, mp_policy=MixedPrecisionPolicy(**mp))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**mp, output_dtype=torch.float32))
    return model, torch.optim.AdamW(model.parameters(), lr=cfg.lr)


def evaluate(model, ds, device):
    r, w = dist.get_rank(), dist.get_world_size()
    x, y = (t[r::w].to(device) for t in ds.tensors)
    model.eval()
    with torch.no_grad():
        s = torch.stack([(model(x) - y).pow(2).sum(), torch.tensor(float(len(y)), device=device)])
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main(cfg=Config()):
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    rank = dist.get_rank()

    X, y = make_regression(1300, 20, n_informative=12, noise=5.0, random_state=cfg.seed)
    X, y = torch.tensor(X).float(), torch.tensor(y).float()
    y = (y - y[:1024].mean()) / y[:1024].std()
    train, val = TensorDataset(X[:1024], y[:1024]), TensorDataset(X[1024:], y[1024:])
    sampler = DistributedSampler(train, seed=cfg.seed)
    loader = DataLoader(train, cfg.batch_size, sampler=sampler, drop_last=True)
    usable = len(loader) - len(loader) % cfg.accum   # whole accumulation windows only

    model, opt = build(cfg, device, mesh)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (xb, yb) in enumerate(loader):
            if i >= usable:
                break
            boundary = (i + 1) % cfg.accum == 0
            model.set_requires_gradient_sync(boundary)
            loss = nn.functional.mse_loss(model(xb.to(device)), yb.to(device)) / cfg.accum
            loss.backward()
            if boundary:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
        mse = evaluate(model, val, device)
        if rank == 0:
            print(f"epoch {epoch} val mse {mse:.4f}")

    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    msd, osd = get_state_dict(model, opt)
    dcp.save({"model": msd, "optim": osd}, checkpoint_id=box[0])

    # read it back into a fresh model and see that it gives the same number
    again, opt2 = build(cfg, device, mesh)
    msd, osd = get_state_dict(again, opt2)
    state = {"model": msd, "optim": osd}
    dcp.load(state, checkpoint_id=box[0])
    set_state_dict(again, opt2, model_state_dict=state["model"], optim_state_dict=state["optim"])
    mse2 = evaluate(again, val, device)
    if rank == 0:
        print(f"reloaded: val mse {mse2:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
