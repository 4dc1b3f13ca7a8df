"""Click-through prediction with embeddings + MLP, sharded with FSDP2."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIELDS = [40, 30, 120, 12]
N_DENSE, DIM, EPOCHS, BATCH, LR, MAX_NORM = 5, 12, 3, 64, 0.15, 0.25


def clicks(n, seed):
    w = torch.Generator().manual_seed(77)
    tables = [torch.randn(f, generator=w) for f in FIELDS]
    dense_w = torch.randn(N_DENSE, generator=w)
    g = torch.Generator().manual_seed(seed)
    cat = torch.stack([torch.randint(f, (n,), generator=g) for f in FIELDS], 1)
    dense = torch.randn(n, N_DENSE, generator=g)
    logit = sum(t[cat[:, i]] for i, t in enumerate(tables)) + dense @ dense_w - 1.0
    logit = logit + tables[0][cat[:, 0]] * tables[3][cat[:, 3]]
    label = torch.bernoulli(torch.sigmoid(logit), generator=g)
    return TensorDataset(cat, dense, label)


class CTR(nn.Module):
    def __init__(self):
        super().__init__()
        self.embs = nn.ModuleList([nn.Embedding(f, DIM) for f in FIELDS])
        self.bottom = nn.Sequential(nn.Linear(N_DENSE, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.top = nn.Sequential(
            nn.Linear(DIM * (len(FIELDS) + 1), 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, cat, dense):
        parts = [e(cat[:, i]) for i, e in enumerate(self.embs)] + [self.bottom(dense)]
        return self.top(torch.cat(parts, 1))


@torch.no_grad()
def clip_gradients(params, max_norm, eps=1e-6):
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    scale = torch.clamp(max_norm / (norm + eps), max=1.0)
    torch._foreach_mul_(grads, scale)
    return norm


@torch.no_grad()
def evaluate(model, loader, world):
    model.eval()
    prob, lab = [], []
    for cat, dense, y in loader:
        prob.append(torch.sigmoid(model(cat, dense)).squeeze(1))
        lab.append(y)
    both = torch.stack([torch.cat(prob), torch.cat(lab)])
    parts = [torch.empty_like(both) for _ in range(world)]
    dist.all_gather(parts, both)
    p, y = torch.cat(parts, 1)
    model.train()
    return roc_auc_score(y.numpy(), p.numpy()), F.binary_cross_entropy(p, y).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(8)
    model = CTR()
    fully_shard(model.bottom, mesh=mesh)
    fully_shard(model.top, mesh=mesh)
    fully_shard(model, mesh=mesh)

    train, valid = clicks(3200, 1), clicks(800, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=8)
    loader = DataLoader(train, BATCH, sampler=sampler)
    valid_loader = DataLoader(valid, 200, sampler=DistributedSampler(valid, world, rank, shuffle=False))
    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        stats = torch.zeros(1)
        for cat, dense, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(cat, dense).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            clip_gradients(list(model.parameters()), MAX_NORM)
            opt.step()
            stats += loss.detach()
        dist.all_reduce(stats)
        auc, ll = evaluate(model, valid_loader, world)
        if rank == 0:
            print(f"epoch {epoch} train {stats.item() / (len(loader) * world):.4f} auc {auc:.4f} logloss {ll:.4f}")

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        os.makedirs("./out/c12", exist_ok=True)
        torch.save(state, "./out/c12/ctr.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
