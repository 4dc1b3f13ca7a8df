import os
import tempfile
from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class DataArguments:
    n_train: int = field(default=2048)
    n_eval: int = field(default=256)
    n_features: int = field(default=12)


class PriceModel(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features, labels=None):
        pred = self.body(features).squeeze(-1)
        out = {"logits": pred}
        if labels is not None:
            out = {"loss": nn.functional.mse_loss(pred, labels), "logits": pred}
        return out


def make_table(n, d, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype(np.float32)
    w = np.linspace(-1, 1, d)
    y = (x @ w + 0.5 * x[:, 0] * x[:, 1] + 0.1 * rng.normal(size=n)).astype(np.float32)
    return Dataset.from_dict({"features": x.tolist(), "labels": y.tolist()}).with_format("torch")


def compute_metrics(p):
    err = p.predictions - p.label_ids
    return {"rmse": float(np.sqrt((err ** 2).mean())), "mae": float(np.abs(err).mean())}


def main():
    (data_args,) = HfArgumentParser(DataArguments).parse_args_into_dataclasses()
    set_seed(5)
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))

    train_ds = make_table(data_args.n_train, data_args.n_features, seed=0)
    train_ds = train_ds.shard(num_shards=world_size, index=rank)
    eval_ds = make_table(data_args.n_eval, data_args.n_features, seed=1)

    args = TrainingArguments(
        output_dir=os.path.join(tempfile.gettempdir(), "price_model"),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        num_train_epochs=4,
        learning_rate=5e-3,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=16,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=PriceModel(data_args.n_features), args=args, train_dataset=train_ds,
                      eval_dataset=eval_ds, compute_metrics=compute_metrics)
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print({k: round(float(v), 4) for k, v in metrics.items()})


if __name__ == "__main__":
    main()
