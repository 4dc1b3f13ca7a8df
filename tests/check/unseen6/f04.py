"""Sequence tagging with a small transformer under FSDP2: per-block sharding, accumulation, full checkpoint."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, TAGS, SEQ, DIM = 40, 3, 16, 32
EPOCHS, MICRO, ACCUM = 3, 12, 2


def brackets(n, seed):
    """Tag each token: 0 = plain, 1 = follows a smaller token, 2 = equals the token two before."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, VOCAB, (n, SEQ), generator=g)
    again = torch.rand(n, SEQ, generator=g) < 0.25
    for t in range(2, SEQ):
        x[:, t] = torch.where(again[:, t], x[:, t - 2], x[:, t])
    y = torch.zeros_like(x)
    y[:, 1:][x[:, 1:] > x[:, :-1]] = 1
    y[:, 2:][x[:, 2:] == x[:, :-2]] = 2
    return TensorDataset(x, y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Dropout(0.05), nn.Linear(2 * DIM, DIM))

    def forward(self, h):
        b, t, _ = h.shape
        q, k, v = self.qkv(self.n1(h)).view(b, t, 3, 4, DIM // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v)
        h = h + self.proj(a.transpose(1, 2).reshape(b, t, DIM))
        return h + self.mlp(self.n2(h))


class Tagger(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(0.02 * torch.randn(SEQ, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.out = nn.Linear(DIM, TAGS)

    def forward(self, x):
        h = self.tok(x) + self.pos
        for blk in self.blocks:
            h = blk(h)
        return self.out(h)


def evaluate(model, data, rank, world):
    # same number of forward passes everywhere: each forward gathers the shards
    model.eval()
    tally = torch.zeros(2, dtype=torch.long)
    x, y = data.tensors
    with torch.no_grad():
        for i in range(0, len(x), 64 * world):
            lo = i + rank * 64
            logits = model(x[lo:lo + 64])
            tally[0] += (logits.argmax(-1) == y[lo:lo + 64]).sum()
            tally[1] += y[lo:lo + 64].numel()
    dist.all_reduce(tally)
    model.train()
    return tally[0].item() / tally[1].item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(0)  # fully_shard cuts what each process holds, so all must hold the same
    model = Tagger()
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    torch.manual_seed(500 + rank)  # dropout

    train, test = brackets(1200, 1), brackets(256, 2)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=MICRO, sampler=sampler, drop_last=True)
    assert len(loader) % ACCUM == 0 and len(test) % (64 * world) == 0

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for i, (x, y) in enumerate(loader):
            boundary = (i + 1) % ACCUM == 0
            model.set_requires_gradient_sync(boundary)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss / ACCUM).backward()
            seen += torch.tensor([loss.item(), 1.0])
            if boundary:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
        dist.all_reduce(seen)
        norm = norm.full_tensor().item()
        acc = evaluate(model, test, rank, world)
        if rank == 0:
            print(f"[{epoch}] loss {seen[0] / seen[1]:.4f} grad-norm {norm:.3f} acc {acc:.4f}")

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        os.makedirs("out/f04", exist_ok=True)
        torch.save(full, "out/f04/tagger.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
