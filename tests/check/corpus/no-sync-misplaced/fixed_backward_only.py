# Language-model style loop with gradient accumulation, synthetic tokens.
import argparse, datetime, os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=40)
ap.add_argument("--eval_interval", type=int, default=20)
ap.add_argument("--grad_accum", type=int, default=4)
ap.add_argument("--batch", type=int, default=8)
ap.add_argument("--block", type=int, default=16)
args = ap.parse_args()

cuda = torch.cuda.is_available()
local_rank = int(os.environ["LOCAL_RANK"])
if cuda:
    torch.cuda.set_device(local_rank)
dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=5))
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
torch.manual_seed(1337)

# tokens of a noisy counter modulo 17
tokens = (torch.arange(20_000) + torch.randint(0, 2, (20_000,), generator=torch.Generator().manual_seed(0))) % 17
train_tokens, val_tokens = tokens[:18_000], tokens[18_000:]
data_rng = torch.Generator().manual_seed(1337 + rank)  # every rank draws its own batches


def get_batch(source, generator):
    ix = torch.randint(len(source) - args.block - 1, (args.batch,), generator=generator)
    x = torch.stack([source[i : i + args.block] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + args.block] for i in ix])
    return x.to(device), y.to(device)


class TinyLM(nn.Module):
    def __init__(self, vocab=17, dim=32):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, idx):
        return self.head(self.mix(self.wte(idx))[0])


def lm_loss(logits, y):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1))


@torch.no_grad()
def estimate_loss(net):
    net.eval()
    generator = torch.Generator().manual_seed(rank)
    total = sum(lm_loss(net(x), y) for x, y in (get_batch(val_tokens, generator) for _ in range(5))) / 5
    dist.all_reduce(total)
    net.train()
    return total.item() / world_size


model = DDP(TinyLM().to(device), gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(1, args.steps + 1):
    for micro_step in range(args.grad_accum):
        x, y = get_batch(train_tokens, data_rng)
        last = micro_step == args.grad_accum - 1
        model.require_backward_grad_sync = last
        loss = lm_loss(model(x), y) / args.grad_accum
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % args.eval_interval == 0:
        val = estimate_loss(model.module)
        if rank == 0:
            print(f"step {step}: val loss {val:.4f}")
dist.destroy_process_group()
