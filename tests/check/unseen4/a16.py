"""Masked-token model with FSDP2, bf16 params, accumulation and DCP checkpoints (--resume)."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, MASK, LENGTH = 40, 0, 24


class MaskedLM(nn.Module):
    def __init__(self, dim=64, depth=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Parameter(0.02 * torch.randn(LENGTH, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, VOCAB))

    def forward(self, ids):
        h = self.tok(ids) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.head(h).float()


class TrainState(Stateful):
    def __init__(self, model, opt):
        self.model, self.opt = model, opt
        self.epoch = self.step = 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "epoch": self.epoch, "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.epoch, self.step = sd["epoch"], sd["step"]


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB - 1, (n, 1), generator=g)
    stride = torch.randint(1, 6, (n, 1), generator=g)
    ids = (start + stride * torch.arange(LENGTH)) % (VOCAB - 1) + 1
    return TensorDataset(ids)


def mask_tokens(ids, g, k=5):
    chosen = torch.rand(ids.shape, generator=g).topk(k, dim=1).indices
    hide = torch.zeros_like(ids, dtype=torch.bool).scatter(1, chosen, True)
    return ids.masked_fill(hide, MASK), ids.masked_fill(~hide, -100)


def eval_batches(dataset, batch, rank, world):
    """Same number of batches on every rank; the tail is filled with unscored rows."""
    ids, labels = mask_tokens(dataset.tensors[0], torch.Generator().manual_seed(123))
    fill = -len(ids) % (batch * world)
    ids = torch.cat([ids, ids[:1].expand(fill, -1)])[rank::world]
    labels = torch.cat([labels, torch.full((fill, LENGTH), -100)])[rank::world]
    return zip(ids.split(batch), labels.split(batch))


@torch.no_grad()
def evaluate(model, dataset, batch, rank, world):
    model.eval()
    s = torch.zeros(3, dtype=torch.float64)
    for ids, labels in eval_batches(dataset, batch, rank, world):
        logits = model(ids)
        scored = labels != -100
        s[0] += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        s[1] += (logits.argmax(-1) == labels)[scored].sum()
        s[2] += scored.sum()
    dist.all_reduce(s)
    model.train()
    return (s[:2] / s[2]).tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--seed", type=int, default=6)
    ap.add_argument("--out", default="./out/a16")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    train_set, val_set = make_data(800, seed=1), make_data(150, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    n_micro = len(loader)
    total = args.epochs * math.ceil(n_micro / args.accum)

    torch.manual_seed(args.seed)
    model = MaskedLM()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    state = TrainState(model, opt)
    if args.resume:
        dcp.load({"app": state}, checkpoint_id=os.path.join(args.out, "last"))

    while state.epoch < args.epochs:
        sampler.set_epoch(state.epoch)
        g = torch.Generator().manual_seed(args.seed + 7919 * state.epoch + rank)
        for i, (ids,) in enumerate(loader):
            first = i // args.accum * args.accum
            window = min(args.accum, n_micro - first)
            boundary = i == first + window - 1
            model.set_requires_gradient_sync(boundary)
            inputs, labels = mask_tokens(ids, g)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)
            (loss / window).backward()
            if boundary:
                lr = args.lr * min(1.0, (state.step + 1) / 8) * (1 - state.step / total)
                for group in opt.param_groups:
                    group["lr"] = lr
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
                opt.step()
                opt.zero_grad()
                state.step += 1
        state.epoch += 1
        nll, acc = evaluate(model, val_set, 16, rank, world)
        if rank == 0:
            print(f"epoch {state.epoch} |g| {norm:.3f} val nll {nll:.4f} masked acc {acc:.4f}", flush=True)
        dcp.save({"app": state}, checkpoint_id=os.path.join(args.out, "last"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
