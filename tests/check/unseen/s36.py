import os
import torch
import torch.nn as nn
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler
from sklearn.datasets import make_classification

CFG = dict(epochs=3, batch_size=32, lr=0.05, clip=1.0, seed=2024, hidden=128)


def build_loaders(rank, world):
    X, y = make_classification(n_samples=2400, n_features=24, n_informative=12, n_classes=4, random_state=CFG["seed"])
    X, y = torch.tensor(X).float(), torch.tensor(y).long()
    train, val = TensorDataset(X[:2048], y[:2048]), TensorDataset(X[2048:], y[2048:])
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=CFG["seed"])
    val_idx = list(range(rank, len(val), world))
    return (DataLoader(train, batch_size=CFG["batch_size"], sampler=sampler, drop_last=True),
            DataLoader(torch.utils.data.Subset(val, val_idx), batch_size=128), sampler)


def train_one_epoch(model, loader, opt, sched, scaler, device, amp_dtype):
    model.train()
    skipped = 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        opt.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=amp_dtype):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), CFG["clip"])
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1        # overflow: the gradients are the averaged ones, so all ranks skip together
        else:
            sched.step()
    return skipped


@torch.no_grad()
def validate(model, loader, device, amp_dtype):
    model.eval()
    hit = torch.zeros(2, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        with torch.autocast(device.type, dtype=amp_dtype):
            pred = model(x).argmax(1)
        hit[0] += (pred == y).sum()
        hit[1] += y.numel()
    dist.all_reduce(hit)
    return (hit[0] / hit[1]).item()


def main():
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    amp_dtype = torch.float16
    loader, val_loader, sampler = build_loaders(rank, world)

    torch.manual_seed(CFG["seed"])
    h = CFG["hidden"]
    bare = nn.Sequential(nn.Linear(24, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 4)).to(device)
    model = DDP(bare, device_ids=[local] if use_cuda else None, gradient_as_bucket_view=True)
    opt = torch.optim.SGD(model.parameters(), lr=CFG["lr"], momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=CFG["epochs"] * len(loader))
    scaler = torch.amp.GradScaler(device.type)

    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        skipped = train_one_epoch(model, loader, opt, sched, scaler, device, amp_dtype)
        acc = validate(bare, val_loader, device, amp_dtype)
        if rank == 0:
            print(f"epoch {epoch} acc {acc:.4f} scale {scaler.get_scale():.0f} skipped {skipped}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
