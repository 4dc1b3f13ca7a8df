"""SimCLR-style contrastive pretraining on digits, negatives from all ranks."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        ctx.n = x.size(0)
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        r = dist.get_rank()
        return grad[r * ctx.n:(r + 1) * ctx.n]


class Views(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def augment(self, img):
        dx, dy = torch.randint(-1, 2, (2,)).tolist()
        img = torch.roll(img, (dx, dy), dims=(0, 1))
        return (img + 0.1 * torch.randn_like(img)).flatten()

    def __getitem__(self, i):
        return self.augment(self.x[i]), self.augment(self.x[i])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        self.proj = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        return F.normalize(self.proj(self.body(x)), dim=1)


def info_nce(a, b, tau=0.2):
    all_b = GatherWithGrad.apply(b)
    logits = a @ all_b.t() / tau
    target = torch.arange(a.size(0), device=a.device) + dist.get_rank() * a.size(0)
    return F.cross_entropy(logits, target)


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(local)

    X, y = load_digits(return_X_y=True)
    X = torch.tensor(X / 16.0).float().view(-1, 8, 8)
    ds = Views(X[:1500])
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=50, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    enc = Encoder().to(device)
    model = DDP(enc, device_ids=[local] if cuda else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    torch.manual_seed(1000 + rank)  # augmentations differ per rank

    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for v1, v2 in loader:
            v1, v2 = v1.to(device), v2.to(device)
            z1, z2 = model(torch.cat([v1, v2])).chunk(2)
            loss = 0.5 * (info_nce(z1, z2) + info_nce(z2, z1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        if rank == 0:
            enc.eval()
            with torch.no_grad():
                f = enc.body(X.flatten(1).to(device)).cpu().numpy()
            knn = KNeighborsClassifier(5).fit(f[:1500], y[:1500])
            print(f"epoch {epoch} last loss {mean_loss.item() / dist.get_world_size():.3f} "
                  f"knn acc {knn.score(f[1500:], y[1500:]):.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
