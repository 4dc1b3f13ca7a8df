import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def compute_accuracy(logits, targets):
    correct = (logits.argmax(-1) == targets).sum().float()
    total = torch.tensor(float(targets.numel()), device=targets.device)
    return {
        "full_acc_sum": correct,
        "full_acc_total": total,
        "cond_acc_sum": correct,
        "cond_acc_total": total.clone(),
    }


def reduce_metrics(metrics):
    for value in metrics.values():
        dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return metrics


def drafts(n, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 30, (n, 6), generator=g)
    return TensorDataset(tokens, tokens[:, 0])


class Drafter(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 32)
        self.mlp = nn.Sequential(nn.Linear(6 * 32, 128), nn.ReLU(), nn.Linear(128, 30))

    def forward(self, tokens):
        return self.mlp(self.emb(tokens).flatten(1))


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    train, val = drafts(2560, 1), drafts(301, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 128 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 400, num_workers=1, pin_memory=cuda)
    model = DDP(Drafter().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for tokens, target in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(tokens.to(device)), target.to(device)).backward()
            optimizer.step()
        model.eval()
        for tokens, target in val_loader:  # one batch
            with torch.no_grad():
                metrics = reduce_metrics(compute_accuracy(model.module(tokens.to(device)), target.to(device)))
        if rank == 0:
            print(f"epoch {epoch}: val/full_acc={metrics['full_acc_sum'].item() / metrics['full_acc_total'].item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
