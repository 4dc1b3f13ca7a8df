import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

SEQ, VOCAB, MICRO, EVAL_ITERS = 24, 20, 2, 12


def conversations(n, seed):
    """Tokens and the mask of the answer, which is short for most of them."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    tokens = (start + torch.arange(SEQ + 1) * torch.randint(1, 4, (n, 1), generator=g)) % VOCAB
    answer = (torch.rand(n, 1, generator=g) ** 3 * SEQ).long().clamp(min=1)
    return TensorDataset(tokens, torch.arange(SEQ) >= SEQ - answer)


class Model(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(VOCAB, dim), nn.GRU(dim, dim, batch_first=True), nn.Linear(dim, VOCAB)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def loss_and_tokens(model, tokens, mask):
    losses = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * mask.flatten()).sum(), mask.sum().float()


@torch.no_grad()
def evaluate(net, loader, device):
    net.eval()
    total = torch.zeros((), device=device)
    batches = iter(loader)
    for _ in range(EVAL_ITERS):
        micro_losses = []
        for _ in range(2):
            tokens, mask = (t.to(device) for t in next(batches))
            loss_sum, count = loss_and_tokens(net, tokens, mask)
            micro_losses.append(loss_sum / count.clamp(min=1))
        loss = torch.stack(micro_losses).mean()
        dist.all_reduce(loss)
        total += loss / dist.get_world_size()
    net.train()
    return (total / EVAL_ITERS).item()


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(1234)
    train, val = conversations(640, 1), conversations(MICRO * 2 * EVAL_ITERS * world, 2)
    sampler = DistributedSampler(train, seed=1234)
    loader = DataLoader(train, 32 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), MICRO, num_workers=1, pin_memory=cuda)
    model = DDP(Model().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, mask in loader:
            optimizer.zero_grad()
            loss_sum, count = loss_and_tokens(model, tokens.to(device), mask.to(device))
            dist.all_reduce(count)
            (loss_sum * world / count).backward()
            optimizer.step()
        loss = evaluate(model.module, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: validation loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
