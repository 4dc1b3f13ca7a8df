"""Intent classification with a bag-of-ngrams transformer, Accelerate edition."""
import json
import random
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import get_linear_schedule_with_warmup

CONFIG = dict(epochs=3, batch_size=16, lr=3e-3, warmup_frac=0.1, clip=1.0, seed=42, vocab=200, max_len=20)
INTENTS = 6


class Queries(Dataset):
    """Each intent prefers a handful of words; everything else is filler."""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            intent = rng.randrange(INTENTS)
            length = rng.randint(6, CONFIG["max_len"])
            words = [rng.randint(60, CONFIG["vocab"] - 1) for _ in range(length)]
            for pos in rng.sample(range(length), 2):
                words[pos] = 1 + intent * 8 + rng.randrange(10)
            self.rows.append((words, intent))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    ids = torch.zeros(len(rows), CONFIG["max_len"], dtype=torch.long)
    for k, (words, _) in enumerate(rows):
        ids[k, : len(words)] = torch.tensor(words)
    return {"ids": ids, "labels": torch.tensor([r[1] for r in rows])}


class IntentNet(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb = nn.Embedding(CONFIG["vocab"], d, padding_idx=0)
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.1, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.cls = nn.Linear(d, INTENTS)

    def forward(self, ids):
        pad = ids == 0
        h = self.enc(self.emb(ids), src_key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1).float()
        return self.cls((h * keep).sum(1) / keep.sum(1))


def evaluate(accelerator, model, loader):
    model.eval()
    hits = seen = 0
    for batch in loader:
        with torch.no_grad():
            pred = model(batch["ids"]).argmax(-1)
        pred, ref = accelerator.gather_for_metrics((pred, batch["labels"]))
        hits += (pred == ref).sum().item()
        seen += ref.numel()
    return hits / seen


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(CONFIG["seed"])

    train_dl = DataLoader(Queries(1200, 1), CONFIG["batch_size"], shuffle=True, collate_fn=collate)
    eval_dl = DataLoader(Queries(301, 2), 32, collate_fn=collate)
    model = IntentNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG["lr"], weight_decay=0.01)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)
    set_seed(CONFIG["seed"], device_specific=True)

    total_steps = CONFIG["epochs"] * len(train_dl)
    scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=int(CONFIG["warmup_frac"] * total_steps),
        num_training_steps=total_steps,
    )
    scheduler = accelerator.prepare(scheduler)

    log = []
    for epoch in range(CONFIG["epochs"]):
        model.train()
        running = 0.0
        for batch in train_dl:
            loss = nn.functional.cross_entropy(model(batch["ids"]), batch["labels"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CONFIG["clip"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            running += loss.item()
        mean_loss = accelerator.reduce(torch.tensor(running / len(train_dl)), reduction="mean").item()
        acc = evaluate(accelerator, model, eval_dl)
        log.append({"epoch": epoch, "loss": mean_loss, "acc": acc})
        accelerator.print(log[-1])

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        out = Path("out/p05")
        out.mkdir(parents=True, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), out / "intent.pt")
        (out / "log.json").write_text(json.dumps(log, indent=2))
    accelerator.end_training()


if __name__ == "__main__":
    main()
