import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def sequences(n, length, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, length, 1, generator=g)
    return TensorDataset(x, x.sum(1))


class Adder(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.inp = nn.Linear(12, hidden)
        self.hidden = nn.Linear(hidden, hidden)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.fc(torch.relu(self.hidden(torch.relu(self.inp(x.flatten(1))))))


def train_step(model, x, y, optimizer, scaler, args, device):
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
        pred = model(x)
    loss = nn.functional.mse_loss(pred.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    scaler.step(optimizer)
    scaler.update()


@torch.no_grad()
def evaluate(net, data, device):
    net.eval()
    r, w = dist.get_rank(), dist.get_world_size()
    x, y = (t[r::w].to(device) for t in data.tensors)
    sums = torch.tensor([((net(x) - y) ** 2).sum(), len(y)], device=device)
    dist.all_reduce(sums)
    net.train()
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser(description="network that adds numbers, mixed precision, clipped gradients")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if use_cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(args.seed)

    train, val = sequences(1024, 12, 1), sequences(201, 12, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed)
    loader = DataLoader(train, args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=use_cuda)
    model = DDP(Adder().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            train_step(model, x.to(device), y.to(device), optimizer, scaler, args, device)
        mse = evaluate(model.module, val, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} val mse {mse:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
