"""Character model with FSDP2."""
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

VOCAB = 32


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.rnn = nn.Linear(dim, 2 * dim)
        self.mix = nn.Linear(dim, dim)

    def forward(self, x):
        value, gate = self.rnn(self.norm(x)).chunk(2, dim=-1)
        steps = torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)
        history = torch.cumsum(value, dim=1) / steps
        return x + self.mix(history * torch.sigmoid(gate))


class CharModel(nn.Module):
    def __init__(self, dim=48, depth=3):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_sequences(n, length, seed):
    rule = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (n, 1), generator=g)
    rows = [ids]
    for _ in range(length):
        noise = torch.randint(VOCAB, (n, 1), generator=g)
        keep = torch.rand(n, 1, generator=g) < 0.9
        rows.append(torch.where(keep, rule[rows[-1]], noise))
    return TensorDataset(torch.cat(rows, dim=1))


def lm_loss(model, ids, reduction="mean"):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


def clip_gradients(parameters, max_norm):
    grads = [p.grad.to_local() for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    stat = torch.zeros(2, dtype=torch.float64, device=device)
    for (ids,) in loader:
        ids = ids.to(device)
        stat[0] += lm_loss(model, ids, reduction="sum")
        stat[1] += ids[:, 1:].numel()
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=1.0)
    p.add_argument("--clip", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(args.seed)
    model = CharModel().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    train, val = make_sequences(512, 24, seed=1), make_sequences(128, 24, seed=2)
    train_sampler = DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    val_sampler = DistributedSampler(val, shuffle=False, drop_last=True)
    train_loader = DataLoader(train, batch_size=args.batch_size, sampler=train_sampler, drop_last=True)
    val_loader = DataLoader(val, batch_size=32, sampler=val_sampler)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        for step, (ids,) in enumerate(train_loader):
            loss = lm_loss(model, ids.to(device))
            loss.backward()
            norm = clip_gradients(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step % 8 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} grad_norm {norm.item():.3f}", flush=True)
        val_loss = evaluate(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} val_loss {val_loss:.4f}", flush=True)

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="char_fsdp_")
        os.makedirs(out, exist_ok=True)
        torch.save(state, os.path.join(out, "model.pt"))
        print("saved", out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
