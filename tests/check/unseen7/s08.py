"""Keyword spotting on synthetic spectrograms: token mixer sharded with fully_shard, SGD."""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

MELS, STEPS, WORDS, WIDTH = 24, 20, 12, 48
EPOCHS, BATCH, LR, MAX_NORM = 4, 24, 0.15, 0.2
OUT = "out/s08"


def spectrograms(n, seed):
    proto = torch.randn(WORDS, STEPS, MELS, generator=torch.Generator().manual_seed(77))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(WORDS, (n,), generator=g)
    shift = torch.randint(-2, 3, (n,), generator=g).tolist()
    x = torch.stack([torch.roll(proto[k], s, dims=0) for k, s in zip(y.tolist(), shift)])
    return TensorDataset(x + 1.2 * torch.randn(x.shape, generator=g), y)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.time = nn.Sequential(nn.Linear(STEPS, 32), nn.GELU(), nn.Linear(32, STEPS))
        self.chan = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))

    def forward(self, x):
        x = x + self.time(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.chan(self.n2(x))


class Spotter(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.stem = nn.Linear(MELS, WIDTH)
        self.layers = nn.ModuleList(Mixer() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


@torch.no_grad()
def clip_gradients(params, max_norm):
    """Global-norm clipping that works in place on the storage of sharded gradients."""
    grads = []
    for p in params:
        if p.grad is None:
            continue
        grads.append(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad)
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        out = model(x)
    stat = torch.stack([F.cross_entropy(out, y, reduction="sum"),
                        (out.argmax(1) == y).sum().float(), torch.tensor(float(len(y)))])
    dist.all_reduce(stat)
    return (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))

    train, val = spectrograms(1536, 1), spectrograms(400, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=13)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler, drop_last=True)
    vx, vy = (t[rank::world] for t in val.tensors)

    torch.manual_seed(123)
    model = Spotter()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True)
    warm = 10
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, (k + 1) / warm))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            clip_gradients(model.parameters(), MAX_NORM)
            opt.step()
            sched.step()
            opt.zero_grad()
        val_loss, val_acc = evaluate(model, vx, vy)
        if rank == 0:
            print(f"epoch {epoch} val_loss {val_loss:.4f} val_acc {val_acc:.3f}", file=sys.stdout)

    full = {k: v.full_tensor() for k, v in model.state_dict().items()}
    if rank == 0:
        os.makedirs(OUT, exist_ok=True)
        torch.save(full, os.path.join(OUT, "spotter.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
