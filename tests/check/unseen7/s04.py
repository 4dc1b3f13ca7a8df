"""Character-level language model, sharded with FSDP2 over two CPU processes."""
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, CONTEXT, DIM = 28, 32, 48
EPOCHS, MICRO, ACCUM, LR = 3, 8, 2, 3e-3
OUT = Path("out/s04")


def markov_text(length):
    g = torch.Generator().manual_seed(42)
    table = torch.softmax(3 * torch.randn(VOCAB, VOCAB, generator=g), dim=1)
    u = torch.rand(length, generator=g)
    cum = table.cumsum(1)
    seq, state = [], 0
    for t in range(length):
        state = min(int(torch.searchsorted(cum[state], u[t])), VOCAB - 1)
        seq.append(state)
    return torch.tensor(seq)


class Windows(Dataset):
    def __init__(self, stream):
        self.stream = stream

    def __len__(self):
        return (len(self.stream) - 1) // CONTEXT

    def __getitem__(self, i):
        piece = self.stream[i * CONTEXT: (i + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.drop = nn.Dropout(0.05)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(a.transpose(1, 2).reshape(b, t, DIM)))
        return x + self.drop(self.mlp(self.n2(x)))


class CharLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def nll(model, x, y, reduction="mean"):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    text = markov_text(CONTEXT * 512 + 1)
    train, val = Windows(text[: CONTEXT * 448 + 1]), Windows(text[CONTEXT * 448:])
    sampler = DistributedSampler(train, shuffle=True, seed=1)
    loader = DataLoader(train, MICRO, sampler=sampler)
    assert len(val) % world == 0 and len(loader) % ACCUM == 0
    share = len(val) // world
    vx, vy = (torch.stack(z) for z in zip(*(val[i] for i in range(rank * share, (rank + 1) * share))))

    torch.manual_seed(0)
    model = CharLM()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98))
    torch.manual_seed(100 + rank)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader, start=1):
            last = i % ACCUM == 0
            model.set_requires_gradient_sync(last)
            (nll(model, x, y) / ACCUM).backward()
            if last:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
        norm = norm.full_tensor().item()
        model.eval()
        with torch.no_grad():
            stat = torch.stack([nll(model, vx, vy, "sum").double(), torch.tensor(float(vy.numel())).double()])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch}: val nll {stat[0] / stat[1]:.4f}, last grad norm {norm:.2f}")

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        OUT.mkdir(parents=True, exist_ok=True)
        torch.save(state, OUT / "char_lm.pt")
        plain = CharLM().eval()
        plain.load_state_dict(torch.load(OUT / "char_lm.pt"))
        with torch.no_grad():
            print(f"plain copy on first share: {nll(plain, vx, vy):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
