"""Two-tower contrastive pretraining on paired synthetic features."""
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


def tower(d_in, d_out):
    return nn.Sequential(nn.Linear(d_in, 96), nn.GELU(), nn.Linear(96, d_out))


class TwoTower(nn.Module):
    def __init__(self, d_img, d_txt, d_out):
        super().__init__()
        self.image = tower(d_img, d_out)
        self.text = tower(d_txt, d_out)

    def forward(self, img, txt):
        return F.normalize(self.image(img), dim=-1), F.normalize(self.text(txt), dim=-1)


def make_pairs(n, seed, d_img=40, d_txt=24, d_latent=10):
    world = torch.Generator().manual_seed(1234)
    a = torch.randn(d_latent, d_img, generator=world)
    b = torch.randn(d_latent, d_txt, generator=world)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, d_latent, generator=g)
    img = z @ a + 0.3 * torch.randn(n, d_img, generator=g)
    txt = z @ b + 0.3 * torch.randn(n, d_txt, generator=g)
    return TensorDataset(img, txt)


def gather_batch(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def clip_loss(img, txt, temperature):
    img, txt = gather_batch(img), gather_batch(txt)
    logits = img @ txt.t() / temperature
    target = torch.arange(len(logits), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


@torch.no_grad()
def recall_at_1(model, data, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    img, txt = (t.to(device) for t in data.tensors)
    model.eval()
    gallery = F.normalize(model.text(txt), dim=-1)
    mine = torch.arange(rank, len(img), world, device=device)
    query = F.normalize(model.image(img[mine]), dim=-1)
    hits = ((query @ gallery.t()).argmax(1) == mine).sum()
    stat = torch.stack([hits.double(), torch.tensor(float(len(mine)), dtype=torch.double, device=device)])
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=64, help="pairs per process")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--temperature", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    train, val = make_pairs(2048, seed=1), make_pairs(301, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    ddp = DDP(TwoTower(40, 24, 32).to(device), device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
    total = args.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = 0.0
        for img, txt in loader:
            img_emb, txt_emb = ddp(img.to(device), txt.to(device))
            loss = clip_loss(img_emb, txt_emb, args.temperature)
            optimizer.zero_grad(set_to_none=True)
            (loss * world).backward()
            optimizer.step()
            scheduler.step()
            running += loss.item()
        r1 = recall_at_1(ddp.module, val, device)
        if rank == 0:
            print(f"epoch {epoch}  loss {running / len(loader):.4f}  val R@1 {r1:.4f}", flush=True)

    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="two_tower_")
        os.makedirs(out, exist_ok=True)
        torch.save(ddp.module.state_dict(), os.path.join(out, "two_tower.pt"))
        print("saved to", out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
