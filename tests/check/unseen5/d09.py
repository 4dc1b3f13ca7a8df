"""Neural collaborative filtering with BPR loss; leave-one-out evaluation."""
import argparse
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--users", type=int, default=300)
    p.add_argument("--items", type=int, default=400)
    p.add_argument("--per-user", type=int, default=10)
    p.add_argument("--dim", type=int, default=24)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--warmup-ratio", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--output-dir", default="./out/d09")
    return p.parse_args()


def interactions(args):
    """Positives drawn from a planted low-rank preference; the last one of each user is held out."""
    g = torch.Generator().manual_seed(123)
    pref = torch.randn(args.users, 6, generator=g) @ torch.randn(6, args.items, generator=g)
    pos = torch.multinomial((1.5 * pref).softmax(1), args.per_user + 1, generator=g)
    seen = torch.zeros(args.users, args.items, dtype=torch.bool)
    seen.scatter_(1, pos, True)
    users = torch.arange(args.users)
    train = TensorDataset(users.repeat_interleave(args.per_user), pos[:, :-1].reshape(-1))
    free = (~seen).float()
    cand = torch.multinomial(free, 99, generator=g)
    test = TensorDataset(users, torch.cat([pos[:, -1:], cand], 1))
    return train, test, seen


class NCF(nn.Module):
    def __init__(self, users, items, dim):
        super().__init__()
        self.u, self.i = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.bias = nn.Embedding(items, 1)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        nn.init.normal_(self.u.weight, std=0.1)
        nn.init.normal_(self.i.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, u, i):
        u = self.u(u).unsqueeze(1).expand(-1, i.size(1), -1)
        v = self.i(i)
        return (u * v).sum(-1) + self.mlp(torch.cat([u, v], -1)).squeeze(-1) + self.bias(i).squeeze(-1)


def draw_negatives(users, seen):
    return torch.multinomial((~seen[users]).float(), 1)


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(args.seed, device_specific=True)
    train, test, seen = interactions(args)
    train_loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, 128)
    model = NCF(args.users, args.items, args.dim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    max_steps = args.epochs * len(train_loader)
    scheduler = accelerator.prepare(get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=int(args.warmup_ratio * max_steps), num_training_steps=max_steps))
    accelerator.print(f"{len(train)} interactions, {max_steps} optimisation steps")

    history = []
    for epoch in range(args.epochs):
        model.train()
        running = torch.zeros(())
        for users, pos in train_loader:
            items = torch.cat([pos[:, None], draw_negatives(users, seen)], 1)
            score = model(users, items)
            loss = -nn.functional.logsigmoid(score[:, 0] - score[:, 1]).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            running += loss.detach()
        train_loss = accelerator.reduce(running, reduction="mean").item() / len(train_loader)

        model.eval()
        ranks = []
        for users, cand in test_loader:
            with torch.no_grad():
                score = model(users, cand)
            place = (score[:, 1:] >= score[:, :1]).sum(1)
            ranks.append(accelerator.gather_for_metrics(place))
        ranks = torch.cat(ranks)
        hit = ranks < 10
        ndcg = torch.where(hit, 1 / torch.log2(ranks + 2.0), torch.zeros(()))
        history.append({"epoch": epoch, "loss": train_loss, "hr@10": hit.float().mean().item(),
                        "ndcg@10": ndcg.mean().item(), "users": len(ranks)})
        accelerator.print(history[-1])

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.output_dir, "ncf.pt"))
        with open(os.path.join(args.output_dir, "history.json"), "w") as f:
            json.dump(history, f)
    accelerator.end_training()


if __name__ == "__main__":
    main()
