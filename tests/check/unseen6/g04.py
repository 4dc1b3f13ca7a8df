"""Align two views (sensor trace <-> token description) with a symmetric InfoNCE over the global batch."""
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS, BATCH, VOCAB, SEQ = 3, 24, 24, 10
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class PairedViews(Dataset):
    def __init__(self, n, seed):
        world_gen = torch.Generator().manual_seed(123)
        to_trace = torch.randn(6, 40, generator=world_gen)
        to_token = torch.randn(6, SEQ, generator=world_gen)
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(n, 6, generator=g)
        self.trace = z @ to_trace + 0.3 * torch.randn(n, 40, generator=g)
        self.tokens = ((torch.tanh(z @ to_token / 3) + 1) / 2 * (VOCAB - 1)).round().long()

    def __len__(self):
        return len(self.trace)

    def __getitem__(self, i):
        return self.trace[i], self.tokens[i]


class DualEncoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.register_buffer("proj", torch.randn(40, 64) / math.sqrt(40))
        self.trace = nn.Sequential(nn.Linear(64 + 40, 96), nn.GELU(), nn.Linear(96, dim))
        self.emb = nn.Embedding(VOCAB, 16)
        self.text = nn.Sequential(nn.Linear(16 * SEQ, 96), nn.GELU(), nn.Linear(96, dim))
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, trace, tokens):
        a = self.trace(torch.cat([trace, torch.cos(trace @ self.proj)], dim=-1))
        b = self.text(self.emb(tokens).flatten(1))
        return F.normalize(a, dim=-1), F.normalize(b, dim=-1), self.log_scale.exp()


def global_infonce(a, b, scale):
    all_a = torch.cat(dist_fn.all_gather(a))
    all_b = torch.cat(dist_fn.all_gather(b))
    target = torch.arange(len(a)) + dist.get_rank() * len(a)
    return 0.5 * (F.cross_entropy(scale * a @ all_b.t(), target) + F.cross_entropy(scale * b @ all_a.t(), target))


@torch.no_grad()
def retrieval(net, data):
    net.eval()
    idx = list(range(rank, len(data), world))
    a, b, _ = net(data.trace[idx], data.tokens[idx])
    pool_a = [torch.empty_like(a) for _ in range(world)]
    pool_b = [torch.empty_like(b) for _ in range(world)]
    dist.all_gather(pool_a, a)
    dist.all_gather(pool_b, b)
    sim = torch.cat(pool_a) @ torch.cat(pool_b).t()
    net.train()
    truth = torch.arange(len(sim))[:, None]
    top = sim.topk(5, dim=1).indices
    return (top[:, :1] == truth).any(1).float().mean().item(), (top == truth).any(1).float().mean().item()


def run():
    dist.init_process_group("gloo")
    torch.manual_seed(2024 + rank)
    train, val = PairedViews(768, seed=1), PairedViews(256, seed=2)
    model = DDP(DualEncoder())
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    plain = [p for n, p in model.named_parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=3e-3)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=8, drop_last=True)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler, drop_last=True)
    total = EPOCHS * len(loader)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 8) * 0.5 * (1 + math.cos(math.pi * s / total)))

    results = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        meter = torch.zeros(())
        for trace, tokens in loader:
            trace = trace + 0.05 * torch.randn_like(trace)
            loss = global_infonce(*model(trace, tokens))
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            with torch.no_grad():
                model.module.log_scale.clamp_(max=math.log(100.0))
            meter += loss.detach()
        dist.all_reduce(meter)
        r1, r5 = retrieval(model.module, val)
        results.append((r1, r5))
        if rank == 0:
            print(f"epoch {epoch}  loss {meter.item() / world / len(loader):.4f}  R@1 {r1:.3f}  R@5 {r5:.3f}")

    if rank == 0:
        os.makedirs("out/g04", exist_ok=True)
        torch.save({"model": model.module.state_dict(), "retrieval": results}, "out/g04/final.pt")
    dist.barrier()
    dist.destroy_process_group()


run()
