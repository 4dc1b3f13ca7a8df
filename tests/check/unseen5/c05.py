"""Small causal LM on a synthetic Markov language, FSDP2."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, DIM, LAYERS = 40, 32, 48, 2
BATCH, EPOCHS = 16, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Dropout(0.05))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, DIM))
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def markov(n, seed):
    trans = torch.softmax(3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)), -1)
    g = torch.Generator().manual_seed(seed)
    seq = [torch.randint(VOCAB, (n,), generator=g)]
    for _ in range(SEQ):
        seq.append(torch.multinomial(trans[seq[-1]], 1, generator=g).squeeze(1))
    return torch.stack(seq, 1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(1)
    model = LM()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1 + 17 * (rank + 1))

    train, valid = markov(640, 10), markov(128, 11)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    for epoch in range(EPOCHS):
        perm = torch.randperm(len(train), generator=torch.Generator().manual_seed(500 + epoch))
        mine = train[perm[rank::world]]
        model.train()
        tot = torch.zeros(())
        batches = mine.split(BATCH)
        for chunk in batches:
            logits = model(chunk[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            opt.step()
            opt.zero_grad()
            tot += loss.detach()
        dist.all_reduce(tot)

        model.eval()
        ev = torch.zeros(2)
        with torch.no_grad():
            for chunk in valid[rank::world].split(32):
                logits = model(chunk[:, :-1])
                ev[0] += F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum")
                ev[1] += chunk[:, 1:].numel()
        dist.all_reduce(ev)
        if rank == 0:
            print(f"epoch {epoch} train {tot.item() / (world * len(batches)):.4f} "
                  f"ppl {math.exp(ev[0] / ev[1]):.3f} gnorm {norm.item():.3f}")

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        os.makedirs("./out/c05", exist_ok=True)
        torch.save(state, "./out/c05/lm.pt")
        plain = LM().eval()
        plain.load_state_dict(torch.load("./out/c05/lm.pt"))
        ids = valid[:1, :4]
        with torch.no_grad():
            for _ in range(10):
                ids = torch.cat([ids, plain(ids)[:, -1].argmax(-1, keepdim=True)], 1)
        print("sample:", ids[0].tolist())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
