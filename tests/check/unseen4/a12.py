"""Sequence tagging with class-weighted tokens under the Hugging Face Trainer."""
import argparse
import json
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

VOCAB, TAGS, PAD, MASK = 120, 5, 0, 1


class TagData(Dataset):
    """The tag of a token depends on itself and on its left neighbour."""

    def __init__(self, n, seed):
        rs = np.random.RandomState(0)
        table = rs.choice(TAGS, size=(VOCAB, 8), p=[0.6, 0.2, 0.1, 0.06, 0.04])
        rs = np.random.RandomState(seed)
        self.items = []
        for _ in range(n):
            ids = rs.randint(2, VOCAB, rs.randint(6, 40))
            left = np.concatenate([[0], ids[:-1] % 8])
            self.items.append((ids, table[ids, left]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        ids, tags = self.items[i]
        return {"input_ids": ids, "labels": tags}


class Collator:
    def __init__(self, word_dropout, seed):
        self.p = word_dropout
        self.rng = np.random.default_rng(seed)

    def __call__(self, features):
        width = max(len(f["labels"]) for f in features)
        ids = np.full((len(features), width), PAD)
        tags = np.full((len(features), width), -100)
        for row, f in enumerate(features):
            keep = self.rng.random(len(f["labels"])) >= self.p
            ids[row, : len(keep)] = np.where(keep, f["input_ids"], MASK)
            tags[row, : len(keep)] = f["labels"]
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(tags)}


class Tagger(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.conv = nn.Conv1d(dim, 96, 3, padding=1)
        self.out = nn.Linear(96, TAGS)

    def forward(self, input_ids, labels=None):
        h = self.conv(self.emb(input_ids).transpose(1, 2)).transpose(1, 2)
        return {"logits": self.out(F.gelu(h))}


class WeightedTagTrainer(Trainer):
    class_weights = None
    train_collator = None

    def get_train_dataloader(self):
        plain, self.data_collator = self.data_collator, self.train_collator
        loader = super().get_train_dataloader()
        self.data_collator = plain
        return loader

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        labels = inputs["labels"].flatten()
        ce = F.cross_entropy(outputs["logits"].flatten(0, 1), labels, weight=self.class_weights, reduction="sum")
        mass = self.class_weights[labels[labels != -100]].sum()
        if model.training:
            mass = self.accelerator.reduce(mass, reduction="sum") / self.accelerator.num_processes
        loss = ce / mass
        return (loss, outputs) if return_outputs else loss


class JsonLog(TrainerCallback):
    def __init__(self, path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(self.path, "a") as f:
                f.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


def tag_metrics(pred):
    logits = pred.predictions[0] if isinstance(pred.predictions, tuple) else pred.predictions
    guess, gold = logits.argmax(-1), pred.label_ids
    real = gold != -100
    recalls = [(guess[gold == c] == c).mean() for c in range(TAGS)]
    return {"acc": float((guess == gold)[real].mean()), "balanced_acc": float(np.mean(recalls))}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--word_dropout", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=9)
    ap.add_argument("--output_dir", default="./out/a12")
    args = ap.parse_args()
    set_seed(args.seed)

    train_set, eval_set = TagData(640, seed=1), TagData(201, seed=2)
    counts = np.bincount(np.concatenate([t for _, t in train_set.items]), minlength=TAGS)
    weights = torch.tensor(counts.sum() / (TAGS * counts), dtype=torch.float32).sqrt()

    targs = TrainingArguments(
        output_dir=args.output_dir, use_cpu=True, ddp_backend="gloo", num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size, per_device_eval_batch_size=32, learning_rate=args.lr,
        warmup_steps=5, max_grad_norm=1.0, eval_strategy="epoch", save_strategy="epoch", save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="balanced_acc", greater_is_better=True,
        logging_steps=10, remove_unused_columns=False, disable_tqdm=True, report_to=[], seed=args.seed,
    )
    trainer = WeightedTagTrainer(
        model=Tagger(), args=targs, train_dataset=train_set, eval_dataset=eval_set,
        data_collator=Collator(0.0, 0), compute_metrics=tag_metrics,
        callbacks=[EarlyStoppingCallback(2), JsonLog(os.path.join(args.output_dir, "log.jsonl"))],
    )
    trainer.class_weights = weights
    trainer.train_collator = Collator(args.word_dropout, [args.seed, targs.process_index])
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in metrics.items() if "acc" in k})


if __name__ == "__main__":
    main()
