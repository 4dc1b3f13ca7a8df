"""Two-stage fine-tuning: head first, then everything."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Classifier(nn.Module):
    def __init__(self, n_classes=10):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh())
        self.head = nn.Linear(64, n_classes)

    def forward(self, x):
        return self.head(self.backbone(x))


class Session:
    def __init__(self):
        self.cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local = int(os.environ["LOCAL_RANK"])
        if self.cuda:
            torch.cuda.set_device(self.local)
        self.device = torch.device("cuda", self.local) if self.cuda else torch.device("cpu")

    def wrap(self, net):
        return DDP(net, device_ids=[self.local] if self.cuda else None)

    def log(self, *a):
        if self.rank == 0:
            print(*a, flush=True)


def run_stage(s, name, net, params, lr, epochs, loader, sampler, first_epoch, Xv, yv):
    model = s.wrap(net)                 # a fresh wrapper: it looks at requires_grad when it is built
    opt = torch.optim.AdamW(params, lr=lr)
    for epoch in range(first_epoch, first_epoch + epochs):
        sampler.set_epoch(epoch)
        model.train()
        tot = torch.zeros((), device=s.device)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(s.device)), y.to(s.device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            tot += loss.detach()
        dist.all_reduce(tot)
        net.eval()
        with torch.no_grad():
            ok = (net(Xv[s.rank::s.world]).argmax(1) == yv[s.rank::s.world]).sum()
        dist.all_reduce(ok)
        s.log(f"{name} epoch {epoch} train loss {tot.item() / len(loader) / s.world:.4f} acc {ok.item() / len(yv):.4f}")
    return first_epoch + epochs


def main():
    s = Session()
    X, y = load_digits(return_X_y=True)
    X, y = torch.tensor(X / 16).float(), torch.tensor(y).long()
    idx = torch.randperm(len(X), generator=torch.Generator().manual_seed(4))
    tr, va = idx[:1440], idx[1440:]
    ds = TensorDataset(X[tr], y[tr])
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=36, sampler=sampler)
    Xv, yv = X[va].to(s.device), y[va].to(s.device)

    torch.manual_seed(4)
    net = Classifier().to(s.device)

    net.backbone.requires_grad_(False)
    e = run_stage(s, "head", net, list(net.head.parameters()), 5e-3, 2, loader, sampler, 0, Xv, yv)
    net.backbone.requires_grad_(True)
    run_stage(s, "full", net, list(net.parameters()), 1e-3, 2, loader, sampler, e, Xv, yv)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
