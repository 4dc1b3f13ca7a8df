"""Multi-domain regression with per-domain experts; gradients averaged by hand."""
import argparse
import logging
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

log = logging.getLogger("experts")


class Experts(nn.Module):
    def __init__(self, dim=12, hidden=32, domains=6):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.LayerNorm(hidden), nn.ReLU())
        self.experts = nn.ModuleList(nn.Linear(hidden, 1) for _ in range(domains))

    def forward(self, x, domain):
        h = self.trunk(x)
        out = x.new_zeros(len(x))
        for d in domain.unique().tolist():
            sel = (domain == d).nonzero(as_tuple=True)[0]
            out = out.index_put((sel,), self.experts[d](h[sel]).squeeze(-1))
        return out


def synth(n, seed, domains=6, dim=12):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(domains, dim, generator=torch.Generator().manual_seed(99))
    x = torch.randn(n, dim, generator=g)
    d = torch.randint(0, domains, (n,), generator=g)
    y = (x * w[d]).sum(1).tanh() + 0.1 * torch.randn(n, generator=g)
    return x, d, y


def sync_initial(model):
    for t in list(model.parameters()) + list(model.buffers()):
        dist.broadcast(t.data, src=0)


def average_gradients(params, world):
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    grads = [p.grad for p in params]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat.div_(world)
    for g, new in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(new)


def batches(n, epoch, args, rank, world):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(args.seed + epoch))
    step = args.batch_size * world
    for s in range(0, n - step + 1, step):
        yield order[s + rank: s + step: world]


@torch.no_grad()
def evaluate(model, data, rank, world, device):
    model.eval()
    x, d, y = (t[rank::world].to(device) for t in data)
    err = (model(x, d) - y).double()
    s = torch.stack([err.pow(2).sum(), torch.tensor(float(len(y)), dtype=torch.float64, device=device)])
    dist.all_reduce(s)
    model.train()
    return (s[0] / s[1]).sqrt().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=5)
    ap.add_argument("--resume", default=None)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")

    train, val = synth(1000, 1), synth(301, 2)
    torch.manual_seed(args.seed + rank)
    model = Experts().to(device)
    sync_initial(model)
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=args.lr, momentum=0.9)
    steps = len(train[0]) // (args.batch_size * world)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.epochs * steps)

    start = 0
    if args.resume:
        ck = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        sched.load_state_dict(ck["sched"])
        start = ck["epoch"] + 1

    out = None
    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="experts_")
        os.makedirs(out, exist_ok=True)

    for epoch in range(start, args.epochs):
        total = torch.zeros((), device=device)
        for idx in batches(len(train[0]), epoch, args, rank, world):
            x, d, y = (t[idx].to(device) for t in train)
            opt.zero_grad(set_to_none=True)
            loss = (model(x, d) - y).pow(2).mean()
            loss.backward()
            average_gradients(params, world)
            torch.nn.utils.clip_grad_norm_(params, 5.0)
            opt.step()
            sched.step()
            total += loss.detach()
        dist.all_reduce(total)
        rmse = evaluate(model, val, rank, world, device)
        log.info("epoch %d train mse %.4f val rmse %.4f lr %.4f", epoch,
                 total.item() / (steps * world), rmse, sched.get_last_lr()[0])
        if rank == 0:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(),
                        "sched": sched.state_dict(), "epoch": epoch}, os.path.join(out, "last.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
