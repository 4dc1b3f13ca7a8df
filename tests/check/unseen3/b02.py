"""Small decoder trained with fully_shard and gradient clipping."""
import argparse
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

VOCAB, SEQ = 48, 24


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, mask):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class Decoder(nn.Module):
    def __init__(self, d=48, heads=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, d)
        self.pos = nn.Embedding(SEQ, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, ids):
        n = ids.size(1)
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool, device=ids.device), 1)
        x = self.tok(ids) + self.pos(torch.arange(n, device=ids.device))
        for b in self.blocks:
            x = b(x, mask)
        return self.out(self.norm(x))


def make_corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    stride = torch.randint(1, 5, (n, 1), generator=g)
    ids = (start + stride * torch.arange(SEQ + 1)) % VOCAB
    noise = torch.rand(ids.shape, generator=g) < 0.05
    ids[noise] = torch.randint(0, VOCAB, (int(noise.sum()),), generator=g)
    return TensorDataset(ids)


@torch.no_grad()
def clip_gradients(params, max_norm):
    grads = [p.grad for p in params if p.grad is not None]
    shards = [g.to_local() for g in grads]
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(s) for s in shards]))
    coef = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for s in shards:
        s.mul_(coef)
    return total


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    tot = torch.zeros(2, dtype=torch.float64, device=device)
    for (ids,) in loader:
        ids = ids.to(device)
        logits = model(ids[:, :-1])
        nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        tot += torch.tensor([nll.item(), ids[:, 1:].numel()], dtype=torch.float64, device=device)
    dist.all_reduce(tot)
    model.train()
    return (tot[0] / tot[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.5)
    ap.add_argument("--max-norm", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(args.seed)
    model = Decoder().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    train, val = make_corpus(640, 11), make_corpus(128, 12)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    per_rank = len(val) // world
    val_part = Subset(val, range(rank * per_rank, (rank + 1) * per_rank))
    val_loader = DataLoader(val_part, batch_size=32)
    total_steps = args.epochs * len(loader)
    sched = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 10) * 0.5 * (1 + math.cos(math.pi * s / total_steps)))

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            ids = ids.to(device)
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            gnorm = clip_gradients(list(model.parameters()), args.max_norm)
            optimizer.step()
            sched.step()
            step += 1
            if step % 20 == 0:
                avg = loss.detach().clone()
                dist.all_reduce(avg)
                if rank == 0:
                    print(f"step {step} loss {avg.item() / world:.4f} gnorm {gnorm.item():.3f}")
        val_loss = evaluate(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} val {val_loss:.4f}")

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="dec_")
        os.makedirs(out, exist_ok=True)
        torch.save(state, os.path.join(out, "final.pt"))
        print("saved", out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
