"""Fine-tune a small BERT on a synthetic sentence-pair-like task with the Hugging Face Trainer."""
import json
import os

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score
from torch.utils.data import Dataset
from transformers import (BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments,
                          set_seed)

PAD, CLS, SEP, UNK, FIRST = 0, 1, 2, 3, 4
VOCAB = 120


class PatternDataset(Dataset):
    """Label = which of four 'keyword' families dominates the sentence."""

    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.rows = []
        for _ in range(n):
            label = int(rng.choice(4, p=[0.4, 0.3, 0.2, 0.1]))
            length = int(rng.integers(6, 20))
            ids = rng.integers(FIRST, VOCAB, length)
            key = rng.random(length) < 0.35
            ids[key] = FIRST + label * 8 + rng.integers(0, 8, key.sum())
            self.rows.append(([CLS] + ids.tolist() + [SEP], label))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, label = self.rows[i]
        return {"input_ids": ids, "labels": label}


class Collator:
    """Pads to the longest row; optionally replaces tokens by UNK."""

    def __init__(self, drop=0.0, seed=0):
        self.drop, self.rng = drop, np.random.default_rng(seed)

    def __call__(self, rows):
        width = max(len(r["input_ids"]) for r in rows)
        ids = torch.full((len(rows), width), PAD)
        for i, r in enumerate(rows):
            t = torch.tensor(r["input_ids"])
            if self.drop:
                hit = torch.from_numpy(self.rng.random(len(t)) < self.drop) & (t >= FIRST)
                t = torch.where(hit, torch.full_like(t, UNK), t)
            ids[i, :len(t)] = t
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(),
                "labels": torch.tensor([r["labels"] for r in rows])}


class PairCollatorTrainer(Trainer):
    """Uses a clean collator for evaluation."""

    def __init__(self, *args, eval_collator=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_collator = eval_collator

    def get_eval_dataloader(self, eval_dataset=None):
        train_collator, self.data_collator = self.data_collator, self.eval_collator
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = train_collator


class History(TrainerCallback):
    def __init__(self, path):
        self.path, self.rows = path, []

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.rows.append({"step": state.global_step, **metrics})
        if state.is_world_process_zero:
            with open(self.path, "w") as f:
                json.dump(self.rows, f, indent=1)


def summed_cross_entropy(outputs, labels, num_items_in_batch=None):
    total = F.cross_entropy(outputs.logits, labels, reduction="sum")
    return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


def compute_metrics(pred):
    guess = pred.predictions.argmax(-1)
    return {"accuracy": accuracy_score(pred.label_ids, guess),
            "f1": f1_score(pred.label_ids, guess, average="macro", zero_division=0),
            "n": len(guess)}


def main():
    out = "out/bert_pattern"
    args = TrainingArguments(
        output_dir=out, num_train_epochs=2, per_device_train_batch_size=16, per_device_eval_batch_size=32,
        learning_rate=2e-3, weight_decay=0.01, warmup_steps=5, lr_scheduler_type="cosine",
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, load_best_model_at_end=True,
        metric_for_best_model="f1", greater_is_better=True, logging_steps=10, report_to=[], use_cpu=True,
        ddp_backend="gloo", ddp_find_unused_parameters=False, seed=11, disable_tqdm=True)
    set_seed(args.seed)
    os.makedirs(out, exist_ok=True)

    with args.main_process_first(desc="build splits"):
        train, val, test = PatternDataset(900, 0), PatternDataset(333, 1), PatternDataset(251, 2)

    config = BertConfig(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=96, max_position_embeddings=32, num_labels=4,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(config)
    trainer = PairCollatorTrainer(
        model=model, args=args, train_dataset=train, eval_dataset=val, compute_metrics=compute_metrics,
        compute_loss_func=summed_cross_entropy,
        data_collator=Collator(drop=0.1, seed=[args.seed, args.process_index]), eval_collator=Collator(),
        callbacks=[History(os.path.join(out, "history.json"))])
    trainer.train()

    metrics = trainer.evaluate(test, metric_key_prefix="test")
    assert metrics["test_n"] == len(test)
    trainer.save_model(os.path.join(out, "final"))
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in metrics.items()}, flush=True)


if __name__ == "__main__":
    main()
