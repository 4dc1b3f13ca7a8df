"""Fine-tuning in two stages: head first, then the whole network."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Backbone(nn.Module):
    def __init__(self, dim=20, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, width), nn.LayerNorm(width), nn.GELU(),
                                    nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())

    def forward(self, x):
        return self.layers(x)


class Model(nn.Module):
    def __init__(self, backbone, classes, width=64):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def make_task(n, seed, classes=4):
    g = torch.Generator().manual_seed(seed)
    teacher = torch.Generator().manual_seed(55)
    a, b = torch.randn(20, 12, generator=teacher), torch.randn(12, classes, generator=teacher)
    x = torch.randn(n, 20, generator=g)
    y = (torch.relu(x @ a) @ b + torch.randn(n, classes, generator=g)).argmax(1)
    return TensorDataset(x, y)


def pretrained_backbone(path):
    """Stands in for a downloaded checkpoint."""
    net = Backbone()
    if dist.get_rank() == 0:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2024)
            torch.save(Backbone().state_dict(), path)
    dist.barrier()
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return net


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    s = torch.zeros(3, dtype=torch.float64, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        z = model.module(x)
        s[0] += F.cross_entropy(z, y, reduction="sum")
        s[1] += (z.argmax(1) == y).sum()
        s[2] += len(y)
    dist.all_reduce(s)
    model.train()
    return (s[0] / s[2]).item(), (s[1] / s[2]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--freeze-epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--backbone-lr", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=19)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [(args.out or tempfile.mkdtemp(prefix="finetune_")) if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    out = box[0]
    os.makedirs(out, exist_ok=True)

    torch.manual_seed(args.seed)
    net = Model(pretrained_backbone(os.path.join(out, "backbone.pt")), classes=4).to(device)
    set_trainable(net.backbone, args.freeze_epochs == 0)
    model = DDP(net, device_ids=[local_rank] if cuda else None)
    opt = torch.optim.AdamW([
        {"params": list(net.head.parameters()), "lr": args.lr},
        {"params": list(net.backbone.parameters()), "lr": args.backbone_lr},
    ], weight_decay=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs)

    train, val = make_task(1280, 1), make_task(399, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=128)

    best = 0.0
    for epoch in range(args.epochs):
        if epoch == args.freeze_epochs:
            set_trainable(net.backbone, True)
            if rank == 0:
                print("backbone unfrozen")
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.detach()
        sched.step()
        dist.all_reduce(total)
        val_loss, acc = evaluate(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / len(loader) / world:.4f} val {val_loss:.4f} acc {acc:.4f}")
        if acc > best:
            best = acc
            if rank == 0:
                torch.save({"model": net.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                            "epoch": epoch, "acc": acc}, os.path.join(out, "best.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
