# digits + small MLP, DDP.   torchrun --nproc-per-node 2 this_file.py
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

use_cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if use_cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
if use_cuda:
    torch.cuda.set_device(device)

X, y = load_digits(return_X_y=True)
X = torch.tensor(X / 16.0, dtype=torch.float32)
y = torch.tensor(y, dtype=torch.long)
perm = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
n_val = 297
val_ds = TensorDataset(X[perm[:n_val]], y[perm[:n_val]])
train_ds = TensorDataset(X[perm[n_val:]], y[perm[n_val:]])

sampler = DistributedSampler(train_ds, shuffle=True, seed=0)
train_dl = DataLoader(train_ds, batch_size=32, sampler=sampler, drop_last=True, pin_memory=use_cuda)
# every validation sample exactly once over all ranks
val_dl = DataLoader(Subset(val_ds, range(rank, len(val_ds), world)), batch_size=64)

torch.manual_seed(1234)
net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)).to(device)
net = DDP(net, device_ids=[local_rank] if use_cuda else None)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5)
loss_fn = nn.CrossEntropyLoss()

for epoch in range(5):
    sampler.set_epoch(epoch)
    net.train()
    running = torch.zeros(2, device=device)
    for xb, yb in train_dl:
        xb, yb = xb.to(device), yb.to(device)
        opt.zero_grad(set_to_none=True)
        loss = loss_fn(net(xb), yb)
        loss.backward()
        opt.step()
        running += torch.stack([loss.detach() * len(xb), torch.tensor(float(len(xb)), device=device)])
    sched.step()

    net.eval()
    stats = torch.zeros(2, device=device)
    with torch.no_grad():
        for xb, yb in val_dl:
            xb, yb = xb.to(device), yb.to(device)
            stats[0] += (net.module(xb).argmax(1) == yb).sum()
            stats[1] += len(yb)
    dist.all_reduce(running)
    dist.all_reduce(stats)
    if rank == 0:
        print(f"epoch {epoch} loss {running[0] / running[1]:.4f} val acc {stats[0] / stats[1]:.4f} (n={int(stats[1])})")

dist.destroy_process_group()
