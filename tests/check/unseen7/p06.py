"""Character LM with FSDP2 on CPU; trains two legs and reloads the sharded checkpoint in between."""
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TEXT = " ".join(f"{a} {op} {b} is {a + b if op == 'plus' else a * b}."
                for op in ("plus", "times") for a in range(2, 40) for b in range(2, 21))
CHARS = sorted(set(TEXT))
IDS = torch.tensor([CHARS.index(c) for c in TEXT])
SEQ, BATCH, STEPS, EPOCHS_PER_LEG, CLIP = 48, 12, 20, 2, 1.0
ROOT = Path("out/p06")


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(a)
        return x + self.mlp(self.ln2(x))


class CharLM(nn.Module):
    def __init__(self, d=48, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(len(CHARS), d), nn.Embedding(SEQ, d)
        self.layers = nn.ModuleList(Layer(d, 4) for _ in range(layers))
        self.ln, self.out = nn.LayerNorm(d), nn.Linear(d, len(CHARS))

    def forward(self, ids):
        h = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.out(self.ln(h))


def build(mesh):
    torch.manual_seed(0)
    model = CharLM()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=4e-3)


def crops(epoch, rank, world, split):
    """The same global draw everywhere; each process keeps its own stripe."""
    g = torch.Generator().manual_seed(1000 + epoch)
    for _ in range(STEPS):
        at = torch.randint(0, split - SEQ - 1, (BATCH * world,), generator=g)[rank::world]
        w = IDS[at[:, None] + torch.arange(SEQ + 1)]
        yield w[:, :-1], w[:, 1:]


@torch.no_grad()
def heldout_nll(model, rank, world, split):
    tail = IDS[split:]
    n = (len(tail) - 1) // SEQ
    x, y = tail[:n * SEQ].view(n, SEQ), tail[1:n * SEQ + 1].view(n, SEQ)
    rounds = -(-n // (world * 16))  # forward is collective: same count on all processes
    stat = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for r in range(rounds):
        lo = (r * world + rank) * 16
        xs, ys = x[lo:lo + 16], y[lo:lo + 16]
        logits = model(xs if len(xs) else x[:1])
        if len(xs):
            stat[0] += F.cross_entropy(logits.flatten(0, 1), ys.flatten(), reduction="sum").item()
            stat[1] += ys.numel()
    model.train()
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def run_leg(mesh, first, last, rank, world):
    model, opt = build(mesh)
    split = int(0.9 * len(IDS))
    if first > 0:
        msd, osd = get_state_dict(model, opt)
        held = {"model": msd, "optim": osd, "epoch": 0}
        dcp.load(held, checkpoint_id=ROOT / f"upto{first}")
        assert held["epoch"] == first
        set_state_dict(model, opt, model_state_dict=held["model"], optim_state_dict=held["optim"])
    for epoch in range(first, last):
        for x, y in crops(epoch, rank, world, split):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            opt.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).full_tensor()
            opt.step()
        nll = heldout_nll(model, rank, world, split)
        if rank == 0:
            print(f"epoch {epoch} last grad norm {norm.item():.3f} held-out nll {nll:.4f}", flush=True)
    msd, osd = get_state_dict(model, opt)
    dcp.save({"model": msd, "optim": osd, "epoch": last}, checkpoint_id=ROOT / f"upto{last}")
    return model


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    if rank == 0:
        shutil.rmtree(ROOT, ignore_errors=True)
        ROOT.mkdir(parents=True)
    dist.barrier()
    run_leg(mesh, 0, EPOCHS_PER_LEG, rank, world)
    model = run_leg(mesh, EPOCHS_PER_LEG, 2 * EPOCHS_PER_LEG, rank, world)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(full, ROOT / "char_lm.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
