"""VAE on 8x8 digits."""
import os
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class VAE(nn.Module):
    def __init__(self, latent=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.mu = nn.Linear(64, latent)
        self.logvar = nn.Linear(64, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64))

    def encode(self, x):
        h = self.enc(x)
        return self.mu(h), self.logvar(h)

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar

    def elbo(self, x):
        recon, mu, logvar = self(x)
        rec = F.binary_cross_entropy_with_logits(recon, x, reduction="none").sum(1)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
        return (rec + kl).mean()


def setup():
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    lr = int(os.environ["LOCAL_RANK"])
    if use_cuda:
        torch.cuda.set_device(lr)
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda", lr) if use_cuda else torch.device("cpu")


def main():
    rank, world, device = setup()
    X, _ = load_digits(return_X_y=True)
    X = torch.tensor(X / 16.0).float()
    train, val = X[:1500], X[1500:]
    ds = TensorDataset(train)
    sampler = DistributedSampler(ds, shuffle=True, seed=3)
    loader = DataLoader(ds, batch_size=50, sampler=sampler)

    torch.manual_seed(3)
    model = VAE().to(device)
    model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    torch.manual_seed(100 + rank)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for (x,) in loader:
            x = x.to(device)
            optimizer.zero_grad()
            loss = model.module.elbo(x)
            loss.backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            part = val[rank::world].to(device)
            tot = torch.stack([model.module.elbo(part) * len(part), torch.tensor(float(len(part)), device=device)])
        dist.all_reduce(tot)
        if rank == 0:
            print(f"epoch {epoch}  val -elbo {tot[0] / tot[1]:.3f}")

    if rank == 0:
        with torch.no_grad():
            sample = model.module.dec(torch.randn(4, 6, device=device)).sigmoid()
        print("samples", tuple(sample.shape), f"mean {sample.mean():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
