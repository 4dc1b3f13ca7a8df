"""Sequence labelling with transformers.Trainer and a custom token-level loss."""
import argparse
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

WIDTH, VOCAB, TAGS = 32, 30, 5


class Phrases(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        table = torch.randint(0, TAGS, (VOCAB,), generator=torch.Generator().manual_seed(5))
        self.rows = []
        for _ in range(n):
            k = int(torch.randint(2, WIDTH + 1, (1,), generator=g))
            ids = torch.randint(1, VOCAB, (k,), generator=g)
            tags = (table[ids] + torch.cat([ids.new_zeros(1), table[ids[:-1]]])) % TAGS
            self.rows.append({"input_ids": ids, "labels": tags})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    ids = torch.zeros(len(rows), WIDTH, dtype=torch.long)
    labels = torch.full((len(rows), WIDTH), -100)
    for i, r in enumerate(rows):
        ids[i, : len(r["input_ids"])] = r["input_ids"]
        labels[i, : len(r["labels"])] = r["labels"]
    return {"input_ids": ids, "labels": labels}


class Labeller(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d, padding_idx=0)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, TAGS)

    def forward(self, input_ids):
        h, _ = self.rnn(self.emb(input_ids))
        return {"logits": self.out(h)}


def token_loss(outputs, labels, num_items_in_batch=None):
    total = F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(),
                            ignore_index=-100, reduction="sum")
    if num_items_in_batch is None:
        num_items_in_batch = (labels != -100).sum()
    return total / num_items_in_batch


def compute_metrics(pred):
    logits, labels = pred.predictions, pred.label_ids
    if isinstance(logits, tuple):
        logits = logits[0]
    mask = labels != -100
    picked, gold = logits[mask].astype(np.float64), labels[mask]
    top = picked.max(-1, keepdims=True)
    logz = (top + np.log(np.exp(picked - top).sum(-1, keepdims=True)))[:, 0]
    nll = logz - picked[np.arange(len(gold)), gold]
    return {"token_nll": float(nll.mean()), "token_acc": float((picked.argmax(-1) == gold).mean()),
            "rows": len(labels)}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=31)
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "labeller_run"))
    args = ap.parse_args()

    set_seed(args.seed)
    targs = TrainingArguments(
        output_dir=args.out,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=32,
        gradient_accumulation_steps=args.accum,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="token_nll",
        greater_is_better=False,
        logging_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        label_names=["labels"],
        seed=args.seed,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=Labeller(),
        args=targs,
        train_dataset=Phrases(640, 1),
        eval_dataset=Phrases(143, 2),
        data_collator=collate,
        compute_loss_func=token_loss,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    final = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("best", trainer.state.best_metric, {k: final[k] for k in ("eval_token_nll", "eval_token_acc", "eval_rows")})
    trainer.save_model(os.path.join(args.out, "final"))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
