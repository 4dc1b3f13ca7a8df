"""Head first, then the encoder: gradual fine-tuning on digits with DDP."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.proj = nn.Linear(64, dim)
        self.block = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.proj(x)
        return h + self.block(h)

    @torch.no_grad()
    def load_pca(self, x):
        """Stand-in for a pretrained checkpoint: principal directions of the inputs."""
        mean = x.mean(0)
        _, s, v = torch.linalg.svd(x - mean, full_matrices=False)
        k = self.proj.out_features
        w = v[:k] / (s[:k, None] / len(x) ** 0.5)
        self.proj.weight.copy_(w)
        self.proj.bias.copy_(-w @ mean)


class Classifier(nn.Module):
    def __init__(self, encoder, dim=32, classes=10):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.encoder(x))


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def head_groups(net, lr):
    return [{"params": list(net.head.parameters()), "lr": lr, "name": "head"}]


def encoder_group(net, lr):
    return {"params": list(net.encoder.parameters()), "lr": lr, "name": "encoder"}


@torch.no_grad()
def test(net, x, y):
    net.eval()
    out = net(x)
    s = torch.tensor([(out.argmax(1) == y).sum().item(), F.cross_entropy(out, y, reduction="sum").item(), len(y)])
    dist.all_reduce(s)
    net.train()
    return (s[0] / s[2]).item(), (s[1] / s[2]).item()


def train_one_epoch(model, loader, opt, max_norm):
    total = torch.zeros(())
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        params = [p for g in opt.param_groups for p in g["params"]]
        nn.utils.clip_grad_norm_(params, max_norm)
        opt.step()
        total += loss.detach()
    total /= len(loader)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--unfreeze-at", type=int, default=1)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--encoder-lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=8)
    ap.add_argument("--out", default="./out/a15")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
    tr, te = perm[:1408], perm[1408:][rank::world]
    dataset = TensorDataset(x[tr], y[tr])
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    encoder = Encoder()
    encoder.load_pca(x[tr])
    net = Classifier(encoder)
    set_trainable(net.encoder, False)
    model = DDP(net)
    opt = torch.optim.AdamW(head_groups(net, args.lr), weight_decay=0.01)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        if epoch == args.unfreeze_at:
            set_trainable(net.encoder, True)
            opt.add_param_group(encoder_group(net, args.encoder_lr))
            if rank == 0:
                print(f"epoch {epoch}: encoder unfrozen", flush=True)
        loss = train_one_epoch(model, loader, opt, max_norm=1.0)
        acc, nll = test(net, x[te], y[te])
        if rank == 0:
            print(f"epoch {epoch} train {loss:.4f} test acc {acc:.4f} nll {nll:.4f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": net.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, os.path.join(args.out, "last.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
