"""Two-stage fine-tuning: train the head first, then the whole network."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self, d_in=20, width=64, classes=5):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(d_in, width), nn.LayerNorm(width), nn.GELU(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(),
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.backbone(x))

    def set_backbone_trainable(self, flag):
        for p in self.backbone.parameters():
            p.requires_grad_(flag)


def make_data(n, seed, d=20, classes=5):
    teacher = torch.Generator().manual_seed(77)
    w1 = torch.randn(d, 32, generator=teacher)
    w2 = torch.randn(32, classes, generator=teacher)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    y = (torch.tanh(x @ w1) @ w2 + 0.2 * torch.randn(n, classes, generator=g)).argmax(1)
    return TensorDataset(x, y)


def setup():
    cuda = torch.cuda.is_available()
    rank, local, world = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)
    if cuda:
        torch.cuda.set_device(local)
    return rank, local, world, torch.device("cuda", local) if cuda else torch.device("cpu")


@torch.no_grad()
def accuracy(model, data, rank, world, device):
    model.eval()
    x, y = (t[rank::world].to(device) for t in data.tensors)
    stat = torch.stack([(model(x).argmax(1) == y).sum().float(), torch.tensor(float(len(y)), device=device)])
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--head-epochs", type=int, default=2)
    p.add_argument("--full-epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--head-lr", type=float, default=5e-3)
    p.add_argument("--backbone-lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=21)
    p.add_argument("--pretrained", default=None, help="optional state dict of the backbone")
    p.add_argument("--out", default=None)
    args = p.parse_args()

    rank, local, world, device = setup()
    torch.manual_seed(args.seed)
    train, val = make_data(1280, seed=1), make_data(333, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    net = Net().to(device)
    if args.pretrained:
        net.backbone.load_state_dict(torch.load(args.pretrained, map_location=device))
    net.set_backbone_trainable(False)
    model = DDP(net, device_ids=[local] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(net.head.parameters(), lr=args.head_lr)

    for epoch in range(args.head_epochs + args.full_epochs):
        if epoch == args.head_epochs:
            net.set_backbone_trainable(True)
            optimizer.add_param_group({"params": list(net.backbone.parameters()), "lr": args.backbone_lr})
            if rank == 0:
                n = sum(q.numel() for q in net.parameters() if q.requires_grad)
                print(f"unfroze the backbone, {n} trainable parameters")
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach() * len(y), torch.tensor(float(len(y)), device=device)])
        dist.all_reduce(total)
        acc = accuracy(net, val, rank, world, device)
        if rank == 0:
            print(f"epoch {epoch} loss {(total[0] / total[1]).item():.4f} val_acc {acc:.4f}", flush=True)

    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="finetune_")
        os.makedirs(out, exist_ok=True)
        torch.save(net.state_dict(), os.path.join(out, "finetuned.pt"))
        print("saved to", out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
