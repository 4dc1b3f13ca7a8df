# Topic classification of short synthetic tickets with the HF Trainer.
import os
import random

import numpy as np
import torch
from datasets import Dataset
from sklearn.metrics import accuracy_score, f1_score
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

TOPICS = {
    "billing": "invoice refund charge card payment price receipt tax".split(),
    "network": "wifi router signal offline latency cable dns packet".split(),
    "account": "login password email profile locked token username verify".split(),
    "shipping": "parcel courier late address tracking box return label".split(),
}
FILLER = "the my is a please when and it not help after again since today i you can with".split()
VOCAB = {w: i + 1 for i, w in enumerate(sorted(set(FILLER + sum(TOPICS.values(), []))))}
MAX_LEN = 14


def make_corpus(n, seed):
    rng = random.Random(seed)
    names = list(TOPICS)
    rows = {"input_ids": [], "labels": []}
    for _ in range(n):
        y = rng.randrange(len(names))
        words = []
        for _ in range(rng.randint(6, MAX_LEN)):
            p = rng.random()
            if p < 0.22:
                words.append(rng.choice(TOPICS[names[y]]))
            elif p < 0.36:
                words.append(rng.choice(TOPICS[rng.choice(names)]))
            else:
                words.append(rng.choice(FILLER))
        ids = [VOCAB[w] for w in words]
        rows["input_ids"].append(ids + [0] * (MAX_LEN - len(ids)))
        rows["labels"].append(y)
    return Dataset.from_dict(rows)


class TicketNet(nn.Module):
    def __init__(self, n_words, n_classes, width=48):
        super().__init__()
        self.emb = nn.Embedding(n_words + 1, width, padding_idx=0)
        self.att = nn.Linear(width, 1)
        self.out = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, n_classes))

    def forward(self, input_ids, labels=None):
        h = self.emb(input_ids)
        w = self.att(h).squeeze(-1).masked_fill(input_ids == 0, -1e4).softmax(-1)
        logits = self.out((w.unsqueeze(-1) * h).sum(1))
        out = {"logits": logits}
        if labels is not None:
            out = {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        return out


def compute_metrics(pred):
    guess = np.argmax(pred.predictions, axis=-1)
    return {
        "accuracy": accuracy_score(pred.label_ids, guess),
        "macro_f1": f1_score(pred.label_ids, guess, average="macro"),
    }


def main():
    torch.set_num_threads(1)
    args = TrainingArguments(
        output_dir="out/f02",
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=3e-3,
        lr_scheduler_type="linear",
        warmup_steps=10,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="macro_f1",
        logging_steps=20,
        report_to=[],
        disable_tqdm=True,
        seed=13,
    )
    set_seed(args.seed)

    train_ds = make_corpus(2400, seed=1)
    train_ds = train_ds.shard(num_shards=args.world_size, index=args.process_index)
    eval_ds = make_corpus(500, seed=2)

    trainer = Trainer(
        model=TicketNet(len(VOCAB), len(TOPICS)),
        args=args,
        train_dataset=train_ds,
        eval_dataset=eval_ds,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in scores.items() if isinstance(v, float)})
        trainer.save_model(os.path.join(args.output_dir, "final"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
