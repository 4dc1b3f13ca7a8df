"""Fine-tune a small encoder on an imbalanced task with the Hugging Face Trainer."""
import argparse
import os
import tempfile

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

VOCAB = 64


class KeywordDataset(Dataset):
    """A sequence is positive when it holds one of a few rare tokens."""

    def __init__(self, n, seed, positive_rate=0.15, length=16):
        rng = np.random.default_rng(seed)
        self.ids = rng.integers(8, VOCAB, size=(n, length))
        self.ids[:, 0] = 1
        self.labels = (rng.random(n) < positive_rate).astype(np.int64)
        for i in np.flatnonzero(self.labels):
            self.ids[i, rng.integers(1, length)] = rng.integers(2, 5)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": torch.from_numpy(self.ids[i]),
                "attention_mask": torch.ones(len(self.ids[i]), dtype=torch.long),
                "labels": int(self.labels[i])}


class BalancedTrainer(Trainer):
    """Trainer that draws the classes equally often."""

    def get_train_dataloader(self):
        labels = torch.as_tensor(self.train_dataset.labels)
        class_freq = torch.bincount(labels).double()
        weights = (1.0 / class_freq)[labels]
        sampler = WeightedRandomSampler(weights, num_samples=len(labels), replacement=True)
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            drop_last=self.args.dataloader_drop_last,
        )


def compute_metrics(pred):
    guess = pred.predictions.argmax(-1)
    truth = pred.label_ids
    tp = int(((guess == 1) & (truth == 1)).sum())
    precision = tp / max(1, int((guess == 1).sum()))
    recall = tp / max(1, int((truth == 1).sum()))
    return {"accuracy": float((guess == truth).mean()),
            "f1": 2 * precision * recall / max(1e-9, precision + recall),
            "n": len(truth)}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=13)
    p.add_argument("--out", default=None)
    args = p.parse_args()
    out = args.out or os.path.join(tempfile.gettempdir(), "balanced_" + os.environ.get("TORCHELASTIC_RUN_ID", "run"))

    set_seed(args.seed)
    config = BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=64, max_position_embeddings=32, num_labels=2)
    model = BertForSequenceClassification(config)

    training_args = TrainingArguments(
        output_dir=out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=args.lr,
        warmup_steps=10,
        lr_scheduler_type="linear",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=20,
        seed=args.seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=False,
    )
    trainer = BalancedTrainer(
        model=model,
        args=training_args,
        train_dataset=KeywordDataset(640, seed=1),
        eval_dataset=KeywordDataset(333, seed=2),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in metrics.items() if k in ("eval_loss", "eval_accuracy", "eval_f1", "eval_n")})
    trainer.save_model(os.path.join(out, "final"))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
