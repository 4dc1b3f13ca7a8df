"""Small patch transformer on digits, sharded with FSDP2, trained by momentum SGD."""
from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    dim: int = 32
    depth: int = 2
    heads: int = 4
    batch: int = 16
    epochs: int = 4
    lr: float = 0.1
    max_norm: float = 1.0
    out: pathlib.Path = pathlib.Path("out/g03")


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.mlp(self.n2(x))


class PatchNet(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.embed = nn.Linear(4, cfg.dim)
        self.pos = nn.Parameter(0.5 * torch.randn(16, cfg.dim))
        self.blocks = nn.ModuleList(Block(cfg.dim, cfg.heads) for _ in range(cfg.depth))
        self.head = nn.Linear(cfg.dim, 10)

    def forward(self, x):
        patches = x.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(x), 16, 4)
        h = self.embed(patches) + self.pos
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


def limit_gradients(parameters, max_norm: float) -> torch.Tensor:
    grads = [p.grad.to_local() for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor)
    return norm


def accuracy(model, loader) -> float:
    model.eval()
    tally = torch.zeros(2, dtype=torch.double)
    with torch.no_grad():
        for x, y in loader:
            tally += torch.tensor([(model(x).argmax(-1) == y).sum().item(), len(y)], dtype=torch.double)
    model.train()
    dist.all_reduce(tally)
    return (tally[0] / tally[1]).item()


def main(cfg: Config) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = PatchNet(cfg)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9, nesterov=True)

    images, target = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16 - 0.3
    y = torch.tensor(target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(99))
    train = TensorDataset(x[order[:1408]], y[order[:1408]])
    held = TensorDataset(x[order[1408:1792]], y[order[1408:1792]])
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    train_loader = DataLoader(train, cfg.batch, sampler=sampler, drop_last=True)
    held_loader = DataLoader(held, 64, sampler=DistributedSampler(held, shuffle=False))

    log = []
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for step, (xb, yb) in enumerate(train_loader):
            loss = F.cross_entropy(model(xb), yb, label_smoothing=0.05)
            loss.backward()
            norm = limit_gradients(model.parameters(), cfg.max_norm)
            optim.step()
            optim.zero_grad()
            if step % 10 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f} |g| {norm.item():.3f}")
        log.append(accuracy(model, held_loader))
        if dist.get_rank() == 0:
            print(f"epoch {epoch} held-out accuracy {log[-1]:.4f}")

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        cfg.out.mkdir(parents=True, exist_ok=True)
        torch.save(weights, cfg.out / "weights.pt")
        (cfg.out / "log.json").write_text(json.dumps(log))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
