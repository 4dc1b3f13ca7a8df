"""Fine-tune a tiny classifier with the transformers Trainer."""
import argparse

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainingArguments


def make_dataset(n=600, features=16, classes=3):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(classes, features))
    labels = rng.integers(classes, size=n)
    x = centers[labels] + rng.normal(size=(n, features))
    return Dataset.from_dict({"x": x.astype(np.float32).tolist(), "labels": labels.tolist()})


class TinyClassifier(nn.Module):
    def __init__(self, features=16, classes=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, x, labels=None):
        logits = self.body(x)
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


def compute_metrics(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def collate(rows):
    return {"x": torch.tensor([r["x"] for r in rows]), "labels": torch.tensor([r["labels"] for r in rows])}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--output_dir", default="runs/tiny-classifier")
    cli = parser.parse_args()

    args = TrainingArguments(
        output_dir=cli.output_dir,
        num_train_epochs=cli.epochs,
        per_device_train_batch_size=12,
        per_device_eval_batch_size=32,
        learning_rate=cli.lr,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=17,
        dataloader_num_workers=1,
        ddp_find_unused_parameters=False,
        ddp_timeout=600,
    )
    splits = make_dataset().train_test_split(test_size=0.2, seed=args.seed)
    torch.manual_seed(args.seed)
    trainer = Trainer(
        model=TinyClassifier(),
        args=args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        data_collator=collate,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(metrics)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
