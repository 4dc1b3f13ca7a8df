"""Imbalanced tabular detection with the Hugging Face Trainer (class-weighted loss, AUC-based selection)."""
import json
import os

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

OUT = "out/g12"


class Rows(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x.astype(np.float32), y.astype(np.int64)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"features": self.x[i], "labels": self.y[i]}


class Detector(nn.Module):
    def __init__(self, d, width=64):
        super().__init__()
        self.stem = nn.Linear(d, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, features, labels=None):
        h = self.stem(features)
        for block in self.blocks:
            h = h + block(h)
        return {"logits": self.head(h)}


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        labels = inputs["labels"]
        per_row = F.cross_entropy(outputs["logits"], labels, reduction="none")
        loss = (self.class_weights[labels] * per_row).mean()
        return (loss, outputs) if return_outputs else loss


class Report(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero:
            print({k: round(v, 4) for k, v in metrics.items() if k.startswith("eval_") and "per_second" not in k})


def collate(rows):
    return {
        "features": torch.from_numpy(np.stack([r["features"] for r in rows])),
        "labels": torch.tensor([r["labels"] for r in rows]),
    }


def metrics(prediction):
    logits, labels = prediction.predictions, prediction.label_ids
    score = logits[:, 1] - logits[:, 0]
    return {
        "auc": roc_auc_score(labels, score),
        "ap": average_precision_score(labels, score),
        "f1": f1_score(labels, score > 0),
        "rows": float(len(labels)),
    }


def main():
    set_seed(9)
    x, y = make_classification(
        n_samples=2000, n_features=16, n_informative=8, weights=[0.85], class_sep=0.9, flip_y=0.03, random_state=4
    )
    x_train, x_rest, y_train, y_rest = train_test_split(x, y, train_size=1408, random_state=1, stratify=y)
    x_val, x_test, y_val, y_test = train_test_split(x_rest, y_rest, train_size=301, random_state=1, stratify=y_rest)
    mean, std = x_train.mean(0), x_train.std(0)
    train, val, test = (Rows((a - mean) / std, b) for a, b in ((x_train, y_train), (x_val, y_val), (x_test, y_test)))
    counts = np.bincount(y_train)
    weights = torch.tensor(len(y_train) / (2.0 * counts), dtype=torch.float32)

    args = TrainingArguments(
        output_dir=OUT, use_cpu=True, ddp_backend="gloo", seed=9,
        num_train_epochs=3, per_device_train_batch_size=32, per_device_eval_batch_size=64,
        learning_rate=4e-3, lr_scheduler_type="cosine", warmup_steps=6, max_grad_norm=1.0,
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="auc", greater_is_better=True,
        dataloader_drop_last=False, remove_unused_columns=False, label_names=["labels"],
        logging_steps=22, report_to=[], disable_tqdm=True,
    )
    trainer = WeightedTrainer(
        model=Detector(x.shape[1]), args=args, train_dataset=train, eval_dataset=val,
        data_collator=collate, compute_metrics=metrics, callbacks=[Report()], class_weights=weights,
    )
    trainer.train()
    final = trainer.predict(test).metrics
    if trainer.is_world_process_zero():
        with open(os.path.join(OUT, "test_metrics.json"), "w") as f:
            json.dump(final, f, indent=1)
        print("test", {k: round(v, 4) for k, v in final.items() if k in ("test_auc", "test_ap", "test_f1", "test_rows")})
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
