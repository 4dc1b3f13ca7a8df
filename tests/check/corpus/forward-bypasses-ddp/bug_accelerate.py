"""Word-order classifier; the encoder's features are used directly for an auxiliary loss."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self, vocab=40, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, 2)

    def features(self, tokens):
        return self.encoder(self.embed(tokens))[1][0]

    def forward(self, tokens):
        feats = self.features(tokens)
        return self.head(feats), feats


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 40, (n, 10), generator=g)
    return TensorDataset(tokens, (tokens[:, 0] > tokens[:, -1]).long())


def step_loss(model, accelerator, tokens, labels):
    net = accelerator.unwrap_model(model)
    feats = net.features(tokens)
    logits = net.head(feats)
    return F.cross_entropy(logits, labels) + 1e-3 * feats.pow(2).mean()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=64)
    args = p.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(3)
    per_process = args.batch_size // accelerator.num_processes
    pin = torch.cuda.is_available()
    train = DataLoader(dataset(1280, 1), per_process, shuffle=True, num_workers=1, pin_memory=pin)
    val = DataLoader(dataset(201, 2), 50, num_workers=1, pin_memory=pin)
    model = Model()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, opt, train, val = accelerator.prepare(model, opt, train, val)
    for epoch in range(args.epochs):
        model.train()
        for tokens, labels in train:
            with accelerator.accumulate(model):
                accelerator.backward(step_loss(model, accelerator, tokens, labels))
                opt.step()
                opt.zero_grad()
        model.eval()
        hits = []
        for tokens, labels in val:
            with torch.no_grad():
                logits, _ = model(tokens)
            hits.append(accelerator.gather_for_metrics(logits.argmax(-1) == labels))
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(hits).float().mean().item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
