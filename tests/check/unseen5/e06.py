"""Small character transformer trained with FSDP2 and an exponential moving average of the weights."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, CTX, EPOCHS, OUT = 24, 16, 2, "./out/e06"


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
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(att.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class CharLM(nn.Module):
    def __init__(self, dim=32, depth=2, heads=4):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(CTX, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, VOCAB))

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.detach().to_local().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p.to_local(), 1.0 - self.decay)

    @contextlib.contextmanager
    def swapped_in(self, model):
        local = {n: p.detach().to_local() for n, p in model.named_parameters()}
        backup = {n: t.clone() for n, t in local.items()}
        for n, t in local.items():
            t.copy_(self.shadow[n])
        yield
        for n, t in local.items():
            t.copy_(backup[n])


def sequences(n, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    step = torch.randint(1, 4, (n, 1), generator=g)
    return TensorDataset((start + step * torch.arange(CTX + 1)) % VOCAB)


def lm_loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, loader):
    s = torch.zeros(2)
    for (ids,) in loader:
        s += torch.tensor([lm_loss(model, ids).item() * len(ids), len(ids)])
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    train_set, val_set = sequences(640, 1), sequences(128, 2)
    sampler = DistributedSampler(train_set, seed=0)
    train_loader = DataLoader(train_set, 16, sampler=sampler)
    val_loader = DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))

    mesh = init_device_mesh("cpu", (world,))
    model = CharLM()
    for module in model.blocks:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ema = EMA(model, decay=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (ids,) in train_loader:
            loss = lm_loss(model, ids)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
        raw = evaluate(model, val_loader)
        with ema.swapped_in(model):
            smooth = evaluate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: val {raw:.4f} val(ema) {smooth:.4f}")

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        os.makedirs(OUT, exist_ok=True)
        torch.save({"model": weights, "ema": ema.shadow, "epochs": EPOCHS}, f"{OUT}/last.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
