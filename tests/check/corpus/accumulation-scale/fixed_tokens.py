"""Next-token training on sequences of very different lengths, padded, with accumulation."""
import argparse
import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

PAD = -100


def make_sequences(n, seed):
    g = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(n):
        length = int(torch.randint(4, 40, (1,), generator=g))
        start, step = torch.randint(0, 23, (2,), generator=g).tolist()
        sequences.append((start + step * torch.arange(length)) % 23)
    return sequences


def collate(batch):
    inputs = pad_sequence([s[:-1] for s in batch], batch_first=True)
    targets = pad_sequence([s[1:] for s in batch], batch_first=True, padding_value=PAD)
    return inputs, targets


class LM(nn.Module):
    def __init__(self, vocab=23, dim=48):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(vocab, dim), nn.GRU(dim, dim, batch_first=True), nn.Linear(dim, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def token_loss(logits, targets, reduction):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction=reduction)


def optimizer_step(model, optimizer, micro_batches, device):
    micro_batches = [(x.to(device), y.to(device)) for x, y in micro_batches]
    tokens = torch.tensor(float(sum((y != PAD).sum() for _, y in micro_batches)), device=device)
    dist.all_reduce(tokens)
    for i, (x, y) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            # DDP averages over the ranks: undo that, then divide by the tokens of all of them
            loss = token_loss(model(x), y, "sum") * dist.get_world_size() / tokens
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(net, sequences, device):
    x, y = collate(sequences[dist.get_rank() :: dist.get_world_size()])
    sums = torch.stack([token_loss(net(x.to(device)), y.to(device), "sum"), (y != PAD).sum().float().to(device)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--grad-accum", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=2))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    torch.manual_seed(0)
    train, val = make_sequences(512, 1), make_sequences(101, 2)
    sampler = DistributedSampler(train, seed=0)
    micro = args.batch_size // args.grad_accum // dist.get_world_size()
    loader = DataLoader(train, micro, sampler=sampler, collate_fn=collate, num_workers=1, pin_memory=gpu)
    model = DDP(LM().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        group = []
        for batch in loader:
            group.append(batch)
            if len(group) == args.grad_accum:
                optimizer_step(model, optimizer, group, device)
                group = []
        nll = evaluate(model.module, val, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: nll per token {nll:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
