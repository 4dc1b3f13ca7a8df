"""Tiny GPT with FSDP2 (fully_shard)."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, CTX = 24, 16


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.h = h

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.h, D // self.h).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(B, T, D))
        return x + self.ff(self.n2(x))


class GPT(nn.Module):
    def __init__(self, d=32, h=4, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(CTX, d)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def sequences(n, seed):
    g = torch.Generator().manual_seed(seed)
    a = torch.randint(0, VOCAB, (n, 1), generator=g)
    s = torch.randint(1, 5, (n, 1), generator=g)
    return TensorDataset((a + s * torch.arange(CTX + 1)) % VOCAB)


def lm_loss(model, ids, reduction="mean"):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(0)
    model = GPT().to(device)
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    train, val = sequences(800, 0), sequences(128, 1)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, 32, sampler=DistributedSampler(val, shuffle=False))  # 128 rows: no padding

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for (ids,) in loader:
            loss = lm_loss(model, ids.to(device))
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        model.eval()
        acc = torch.zeros(2, device=device)
        with torch.no_grad():
            for (ids,) in val_loader:
                acc += torch.stack([lm_loss(model, ids.to(device), "sum"), torch.tensor(float(ids[:, 1:].numel()), device=device)])
        dist.all_reduce(acc)
        if rank == 0:
            print(f"epoch {epoch} val loss {acc[0] / acc[1]:.4f}")

    # collective: each rank takes part, the full tensors land on rank 0
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        path = os.path.join(tempfile.mkdtemp(), "gpt.pt")
        torch.save(full, path)
        print("saved", len(full), "tensors to", path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
