"""Query/document retrieval with in-batch negatives from every process."""
import argparse
import logging
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

log = logging.getLogger("retrieval")


class GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.rows
        return grad[start:start + ctx.rows]


class QueryDocument(Dataset):
    """A document is a bag of topic tokens, its query a short noisy sample of them."""

    def __init__(self, n, seed, vocab=200, doc_len=24, query_len=8):
        g = torch.Generator().manual_seed(seed)
        topics = torch.rand(n, vocab, generator=g).pow(12)
        self.docs = torch.multinomial(topics, doc_len, replacement=True, generator=g)
        keep = torch.randint(doc_len, (n, query_len), generator=g)
        noise = torch.randint(vocab, (n, query_len), generator=g)
        query = self.docs.gather(1, keep)
        self.queries = torch.where(torch.rand(n, query_len, generator=g) < 0.2, noise, query)

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        return self.queries[i], self.docs[i]


class BiEncoder(nn.Module):
    def __init__(self, vocab=200, dim=64):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.query = nn.Linear(dim, dim)
        self.doc = nn.Linear(dim, dim)
        self.log_scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, q, d):
        q = F.normalize(self.query(self.emb(q)), dim=-1)
        d = F.normalize(self.doc(self.emb(d)), dim=-1)
        return q, d, self.log_scale.clamp(max=4.6).exp()


def retrieval_loss(q, d, scale):
    everything = GatherWithGrad.apply(d)
    scores = scale * q @ everything.t()
    positives = torch.arange(len(q), device=q.device)
    return F.cross_entropy(scores, positives)


@torch.no_grad()
def mean_reciprocal_rank(net, data, device):
    net.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.arange(rank, len(data), world)
    q, _, _ = net(data.queries[own].to(device), data.docs[own].to(device))
    _, d, _ = net(data.queries.to(device), data.docs.to(device))
    scores = q @ d.t()
    own = own.to(device)
    target = scores.gather(1, own[:, None])
    place = (scores > target).sum(1) + 1
    stat = torch.stack([(1.0 / place).sum(), torch.tensor(float(len(own)), device=device)])
    dist.all_reduce(stat)
    net.train()
    return (stat[0] / stat[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=23)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(name)s %(message)s")
    torch.manual_seed(args.seed)

    train, val = QueryDocument(1024, seed=1), QueryDocument(203, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(BiEncoder().to(device), device_ids=[local] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for q, d in loader:
            loss = retrieval_loss(*model(q.to(device), d.to(device)))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        mrr = mean_reciprocal_rank(model.module, val, device)
        log.info("epoch %d loss %.4f val_mrr %.4f", epoch, total.item() / dist.get_world_size() / len(loader), mrr)

    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="retrieval_")
        os.makedirs(out, exist_ok=True)
        torch.save(model.module.state_dict(), os.path.join(out, "encoder.pt"))
        log.info("saved %s", out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
