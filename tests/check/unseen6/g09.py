"""Character language model, FSDP2 on CPU. The job runs in two legs: the second leg rebuilds
everything from the sharded checkpoint that the first one wrote."""
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CTX, DIM, MICRO, ACCUM = 32, 48, 8, 2
EPOCHS, FIRST_LEG = 3, 2
ROOT = Path("out/g09")


def corpus(n_words=2400, seed=0):
    g = torch.Generator().manual_seed(seed)
    lexicon = ["shard", "mesh", "rank", "loss", "token", "layer", "graph", "node", "batch", "step"]
    follow = torch.softmax(2 * torch.randn(len(lexicon), len(lexicon), generator=g), -1)
    w, words = 0, []
    for _ in range(n_words):
        words.append(lexicon[w])
        w = int(torch.multinomial(follow[w], 1, generator=g))
    return " ".join(words)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Dropout(0.05), nn.Linear(3 * DIM, DIM))

    def forward(self, x, mask):
        h = self.n1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class CharLM(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, DIM), nn.Embedding(CTX, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, vocab)

    def forward(self, ids):
        mask = torch.ones(CTX, CTX, dtype=torch.bool).triu(1)
        x = self.tok(ids) + self.pos.weight
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def build(vocab, mesh, total):
    torch.manual_seed(0)
    model = CharLM(vocab)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.1 + 0.45 * (1 + math.cos(math.pi * min(s, total) / total)))
    return model, opt, sched


def perplexity(model, loader):
    model.eval()
    acc = torch.zeros(2, dtype=torch.double)
    with torch.no_grad():
        for (chunk,) in loader:
            nll = F.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum")
            acc += torch.tensor([nll.item(), chunk[:, 1:].numel()], dtype=torch.double)
    model.train()
    dist.all_reduce(acc)
    return math.exp(acc[0] / acc[1])


def leg(epochs, train, val, vocab, mesh, resume):
    rank = dist.get_rank()
    sampler = DistributedSampler(train, shuffle=True, seed=4, drop_last=True)
    loader = DataLoader(train, MICRO, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, MICRO, sampler=DistributedSampler(val, shuffle=False, drop_last=True))
    updates = len(loader) // ACCUM
    model, opt, sched = build(vocab, mesh, EPOCHS * updates)
    if resume:
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o, "sched": sched.state_dict()}
        dcp.load(state, checkpoint_id=ROOT / f"upto_{epochs[0] - 1}")
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])
    torch.manual_seed(900 + 10 * epochs[0] + rank)

    for epoch in epochs:
        sampler.set_epoch(epoch)
        for i, (chunk,) in enumerate(loader):
            if i >= updates * ACCUM:
                break
            last = (i + 1) % ACCUM == 0
            model.set_requires_gradient_sync(last)
            loss = F.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten())
            (loss / ACCUM).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
                sched.step()
        ppl = perplexity(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch} lr {sched.get_last_lr()[0]:.2e} val ppl {ppl:.3f}")
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "optim": o, "sched": sched.state_dict()}, checkpoint_id=ROOT / f"upto_{epochs[-1]}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    text = corpus()
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(c) for c in text])
    chunks = ids[: len(ids) // (CTX + 1) * (CTX + 1)].view(-1, CTX + 1)
    train, val = TensorDataset(chunks[:-32]), TensorDataset(chunks[-32:])
    leg(range(FIRST_LEG), train, val, len(alphabet), mesh, resume=False)
    model = leg(range(FIRST_LEG, EPOCHS), train, val, len(alphabet), mesh, resume=True)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save({"model": full, "alphabet": alphabet}, ROOT / "charlm.pt")
    dist.barrier()
    dist.destroy_process_group()
