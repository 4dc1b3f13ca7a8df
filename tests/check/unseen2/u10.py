"""Fine-tune a small text classifier with the Hugging Face Trainer on CPU workers."""
import argparse
import os
import tempfile
import time

import numpy as np
import torch
import torch.nn as nn
from datasets import Dataset
from transformers import Trainer, TrainingArguments, set_seed

WORDS = ["good", "great", "fine", "bad", "poor", "awful", "movie", "plot", "actor", "scene", "the", "a", "was", "and"]


def synth_reviews(n, seed):
    rng = np.random.default_rng(seed)
    rows = {"text": [], "label": []}
    for _ in range(n):
        label = int(rng.integers(2))
        tone = WORDS[:3] if label else WORDS[3:6]
        words = list(rng.choice(WORDS[6:], size=6)) + list(rng.choice(tone, size=2))
        rng.shuffle(words)
        rows["text"].append(" ".join(words))
        rows["label"].append(label)
    return Dataset.from_dict(rows)


def tokenize(batch):
    index = {w: i + 1 for i, w in enumerate(WORDS)}
    return {"input_ids": [[index[w] for w in t.split()] for t in batch["text"]], "labels": batch["label"]}


def prepare_split(n, seed):
    """Tokenise once; each worker keeps the part it needs in memory."""
    ds = synth_reviews(n, seed)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        ds = ds.shard(num_shards=world, index=int(os.environ.get("RANK", 0)), contiguous=True)
    return ds.map(tokenize, batched=True, remove_columns=["text", "label"], load_from_cache_file=False)


def prepare_eval(n, seed):
    ds = synth_reviews(n, seed)
    return ds.map(tokenize, batched=True, remove_columns=["text", "label"], load_from_cache_file=False)


class BowClassifier(nn.Module):
    def __init__(self, vocab=len(WORDS) + 1, dim=24, classes=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, classes))

    def forward(self, input_ids, labels=None):
        mask = (input_ids != 0).unsqueeze(-1).float()
        pooled = (self.emb(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
        logits = self.mlp(pooled)
        out = {"logits": logits}
        if labels is not None:
            out = {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        return out


def collate(rows):
    width = max(len(r["input_ids"]) for r in rows)
    ids = torch.tensor([r["input_ids"] + [0] * (width - len(r["input_ids"])) for r in rows])
    return {"input_ids": ids, "labels": torch.tensor([r["labels"] for r in rows])}


def compute_metrics(pred):
    guess = pred.predictions.argmax(-1)
    return {"accuracy": float((guess == pred.label_ids).mean())}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=float, default=2)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--output", default=os.path.join(tempfile.gettempdir(), "bow_trainer"))
    args = ap.parse_args()
    set_seed(args.seed)

    targs = TrainingArguments(
        output_dir=args.output,
        use_cpu=True,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=32,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=BowClassifier(),
        args=targs,
        train_dataset=prepare_split(320, seed=1),
        eval_dataset=prepare_eval(96, seed=2),
        data_collator=collate,
        compute_metrics=compute_metrics,
    )
    result = trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("train_loss", round(result.training_loss, 4), "eval", {k: round(v, 4) for k, v in metrics.items()})
    trainer.save_model(args.output)
    trainer.accelerator.wait_for_everyone()
    if torch.distributed.is_initialized():
        time.sleep(0.5)  # let the gloo threads finish
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
