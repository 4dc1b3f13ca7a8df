import os, random
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from sklearn.datasets import make_classification
from sklearn.metrics import roc_auc_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, DataLoader
from torch.utils.data.distributed import DistributedSampler


class TwoTask(Dataset):
    def __init__(self, lo, hi):
        X, y = make_classification(1700, 16, n_informative=8, weights=[0.7], flip_y=0.03, random_state=8)
        self.X = X[lo:hi].astype(np.float32)
        self.y = y[lo:hi].astype(np.float32)
        self.t = (0.5 * X[lo:hi, 0] - X[lo:hi, 3]).astype(np.float32)

    def __len__(self):
        return len(self.X)

    def __getitem__(self, i):
        return self.X[i], self.y[i], self.t[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.heads = nn.ModuleDict({"cls": nn.Linear(48, 1), "reg": nn.Linear(48, 1)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x)).squeeze(-1)


def evaluate(model, ds, device, rank, world):
    """AUC needs all scores at one place."""
    model.eval()
    idx = list(range(rank, len(ds), world))
    x = torch.from_numpy(ds.X[idx]).to(device)
    with torch.no_grad():
        mine = (model(x, "cls").cpu().numpy(), ds.y[idx])
    parts = [None] * world
    dist.all_gather_object(parts, mine)
    score = np.concatenate([p[0] for p in parts])
    label = np.concatenate([p[1] for p in parts])
    assert len(label) == len(ds)
    return roc_auc_score(label, score)


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(local)

    train, val = TwoTask(0, 1400), TwoTask(1400, 1700)
    sampler = DistributedSampler(train, shuffle=True, seed=0)
    loader = DataLoader(train, batch_size=28, sampler=sampler)

    torch.manual_seed(0)
    net = Net().to(device)
    # one of the heads takes no part in each step
    model = DDP(net, device_ids=[local] if cuda else None, find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    task_rng = random.Random(17)   # the same sequence of tasks on all ranks
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y, t in loader:
            x, y, t = x.to(device), y.to(device), t.to(device)
            task = "cls" if task_rng.random() < 0.7 else "reg"
            out = model(x, task)
            loss = F.binary_cross_entropy_with_logits(out, y) if task == "cls" else F.mse_loss(out, t)
            opt.zero_grad()
            loss.backward()
            opt.step()
        auc = evaluate(net, val, device, rank, world)
        if rank == 0:
            print("epoch", epoch, "val AUC", round(float(auc), 4))
    dist.destroy_process_group()


main()
