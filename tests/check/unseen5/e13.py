"""Sequence tagging with a focal loss on the Hugging Face Trainer."""
import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from datasets import Dataset
from transformers import Trainer, TrainingArguments, set_seed
from transformers.modeling_outputs import TokenClassifierOutput

VOCAB, TAGS, MAX_LEN = 60, 5, 14


def make_split(n, seed):
    rng = np.random.default_rng(seed)
    table = np.random.default_rng(77).integers(0, TAGS, size=(VOCAB, 3))
    rows = {"input_ids": [], "labels": []}
    for _ in range(n):
        length = int(rng.integers(4, MAX_LEN + 1))
        ids = rng.integers(1, VOCAB, size=length)
        prev = np.concatenate([[0], ids[:-1]])
        rows["input_ids"].append(ids.tolist())
        rows["labels"].append(table[ids, prev % 3].tolist())
    return Dataset.from_dict(rows)


def collate(features):
    n = max(len(f["input_ids"]) for f in features)
    ids = torch.zeros(len(features), n, dtype=torch.long)
    labels = torch.full((len(features), n), -100)
    for i, f in enumerate(features):
        ids[i, : len(f["input_ids"])] = torch.tensor(f["input_ids"])
        labels[i, : len(f["labels"])] = torch.tensor(f["labels"])
    return {"input_ids": ids, "labels": labels}


class Tagger(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.conv = nn.Conv1d(dim, 64, 3, padding=1)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(64, TAGS)

    def forward(self, input_ids, labels=None, **kwargs):
        h = F.relu(self.conv(self.emb(input_ids).transpose(1, 2))).transpose(1, 2)
        return TokenClassifierOutput(logits=self.out(self.drop(h)))


class FocalTrainer(Trainer):
    gamma = 1.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"])
        ce = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        focal = (1 - torch.exp(-ce)).pow(self.gamma) * ce
        focal = focal[labels.flatten() != -100]
        if num_items_in_batch is not None:
            loss = focal.sum() / num_items_in_batch
        else:
            loss = focal.mean()
        return (loss, outputs) if return_outputs else loss


def compute_metrics(pred):
    guess = pred.predictions.argmax(-1)
    mask = pred.label_ids != -100
    return {"token_accuracy": float((guess[mask] == pred.label_ids[mask]).mean())}


def main():
    set_seed(19)
    args = TrainingArguments(
        output_dir="./out/e13",
        num_train_epochs=3,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        gradient_accumulation_steps=2,
        learning_rate=0.3,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        ddp_backend="gloo",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="token_accuracy",
        logging_steps=10,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        seed=19,
    )
    trainer = FocalTrainer(
        model=Tagger(), args=args, data_collator=collate, train_dataset=make_split(800, 1),
        eval_dataset=make_split(200, 2), compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in metrics.items() if k in ("eval_loss", "eval_token_accuracy")})
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
