"""Character-level LM with FSDP2 on CPU."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

VOCAB = 48


class Markov(Dataset):
    def __init__(self, n, length, seed):
        g = torch.Generator().manual_seed(99)
        trans = torch.softmax(3.0 * torch.randn(VOCAB, VOCAB, generator=g), -1)
        g.manual_seed(seed)
        seq = [torch.randint(0, VOCAB, (n,), generator=g)]
        for _ in range(length):
            seq.append(torch.multinomial(trans[seq[-1]], 1, generator=g)[:, 0])
        self.tokens = torch.stack(seq, 1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i, :-1], self.tokens[i, 1:]


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(a)
        return x + self.down(F.silu(self.up(self.n2(x))))


class CharLM(nn.Module):
    def __init__(self, length, dim=48, depth=2, heads=4):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, idx):
        h = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


@torch.no_grad()
def clip_gradients(parameters, max_norm):
    """torch.nn.utils.clip_grad_norm_ without the DTensor dispatch overhead."""
    grads = [p.grad for p in parameters if p.grad is not None]
    grads = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    total_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    coef = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    torch._foreach_mul_(grads, coef)
    return total_norm


@torch.no_grad()
def validate(model, loader):
    model.eval()
    s = torch.zeros(2, dtype=torch.float64)
    for xb, yb in loader:
        s[0] += F.cross_entropy(model(xb).flatten(0, 1), yb.flatten(), reduction="sum")
        s[1] += yb.numel()
    dist.all_reduce(s)
    model.train()
    return (s[0] / s[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--length", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1.0)
    ap.add_argument("--max-norm", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=4)
    ap.add_argument("--out", default="./out/a10")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    train_set, val_set = Markov(640, args.length, seed=1), Markov(128, args.length, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), 32)

    torch.manual_seed(args.seed)
    model = CharLM(args.length)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    total = args.epochs * len(loader)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min(1.0, (s + 1) / 5) * 0.5 * (1 + math.cos(math.pi * min(s, total) / total)))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (xb, yb) in enumerate(loader):
            loss = F.cross_entropy(model(xb).flatten(0, 1), yb.flatten())
            opt.zero_grad()
            loss.backward()
            norm = clip_gradients(model.parameters(), args.max_norm)
            opt.step()
            sched.step()
            if rank == 0 and step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} grad norm {norm:.3f}", flush=True)
        nll = validate(model, val_loader)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            print(f"epoch {epoch} val nll {nll:.4f} ppl {math.exp(nll):.2f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save(full, os.path.join(args.out, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
