"""Transformer encoder for intent classification on synthetic utterances (Accelerate)."""
import json
import pathlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

cfg = dict(vocab=200, classes=8, seq=20, dim=48, heads=4, layers=2, lr=2e-3,
           batch=24, epochs=4, warmup=0.1, seed=3, out="out/s02")


def make_corpus(n, seed):
    """Each intent has six trigger words; an utterance holds three of them among filler."""
    g = torch.Generator().manual_seed(seed)
    triggers = torch.randperm(cfg["vocab"] - 1, generator=torch.Generator().manual_seed(99)) + 1
    triggers = triggers[: cfg["classes"] * 6].view(cfg["classes"], 6)
    y = torch.randint(cfg["classes"], (n,), generator=g)
    x = torch.randint(1, cfg["vocab"], (n, cfg["seq"]), generator=g)
    for k in range(n):
        words = triggers[y[k]][torch.randperm(6, generator=g)[:3]]
        x[k, torch.randperm(cfg["seq"], generator=g)[:3]] = words
    return TensorDataset(x, y)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        d = cfg["dim"]
        self.tok = nn.Embedding(cfg["vocab"], d)
        self.pos = nn.Parameter(torch.randn(cfg["seq"], d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, cfg["heads"], 2 * d, dropout=0.0,
                                           batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, cfg["layers"], enable_nested_tensor=False)
        self.out = nn.Linear(d, cfg["classes"])

    def forward(self, ids):
        h = self.enc(self.tok(ids) + self.pos)
        return self.out(h.mean(1))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(cfg["seed"])
    out = pathlib.Path(cfg["out"])
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)

    train_dl = DataLoader(make_corpus(1600, 1), cfg["batch"], shuffle=True, drop_last=True)
    val_dl = DataLoader(make_corpus(401, 2), 50)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=0.01)

    model, optimizer, train_dl, val_dl = accelerator.prepare(model, optimizer, train_dl, val_dl)

    total_steps = len(train_dl) * cfg["epochs"]
    scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=int(cfg["warmup"] * total_steps),
        num_training_steps=total_steps,
    )
    scheduler = accelerator.prepare(scheduler)

    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    history = []
    for epoch in range(cfg["epochs"]):
        model.train()
        running = []
        for ids, labels in train_dl:
            loss = criterion(model(ids), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            running.append(loss.detach())

        model.eval()
        preds, refs = [], []
        with torch.no_grad():
            for ids, labels in val_dl:
                p, r = accelerator.gather_for_metrics((model(ids).argmax(-1), labels))
                preds.append(p)
                refs.append(r)
        preds, refs = torch.cat(preds), torch.cat(refs)
        acc = (preds == refs).float().mean().item()
        train_loss = accelerator.reduce(torch.stack(running).mean(), reduction="mean").item()
        history.append(dict(epoch=epoch, loss=train_loss, acc=acc, n=len(refs)))
        accelerator.print(history[-1])

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), out / "model.pt")
    if accelerator.is_main_process:
        (out / "history.json").write_text(json.dumps(history, indent=1))
    accelerator.end_training()


if __name__ == "__main__":
    main()
