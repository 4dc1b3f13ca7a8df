"""Ticket routing: streamed log shards, a small text classifier and the Hugging Face Trainer."""
import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments, set_seed

OUT = "out/g14"
SITES = ["berlin", "lyon", "porto", "turin"]
QUEUES, VOCAB, LENGTH, PER_SITE = 6, 400, 16, 384


def site_rows(site, n, seed):
    """Tickets of one site; each site has its own jargon on top of a small shared vocabulary."""
    s = SITES.index(site)
    rng = np.random.default_rng([s, seed])
    queue = rng.integers(QUEUES, size=n)
    jargon = 40 + 90 * s + 15 * queue[:, None] + rng.integers(15, size=(n, LENGTH))
    common = rng.integers(40, size=(n, LENGTH))
    noise = rng.integers(40, VOCAB, size=(n, LENGTH))
    pick = rng.random((n, LENGTH))
    tokens = np.where(pick < 0.3, jargon, np.where(pick < 0.7, common, noise))
    return tokens.astype(np.int64), queue.astype(np.int64)


class TicketStream(IterableDataset):
    def __init__(self, sites, seed=0):
        self.sites, self.seed, self.epoch = list(sites), seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        parts = [site_rows(s, PER_SITE, seed=0) for s in self.sites]
        tokens, queue = (np.concatenate(p) for p in zip(*parts))
        for i in np.random.default_rng([self.seed, self.epoch]).permutation(len(queue)):
            yield {"tokens": torch.from_numpy(tokens[i]), "labels": torch.tensor(queue[i])}


class Held(Dataset):
    def __init__(self, sites):
        parts = [site_rows(s, 60, seed=1) for s in sites]
        self.tokens, self.queue = (np.concatenate(p) for p in zip(*parts))

    def __len__(self):
        return len(self.queue)

    def __getitem__(self, i):
        return {"tokens": torch.from_numpy(self.tokens[i]), "labels": torch.tensor(self.queue[i])}


class Router(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.att = nn.Linear(dim, 1)
        self.head = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, QUEUES))

    def forward(self, tokens, labels=None):
        h = self.emb(tokens)
        pooled = (torch.softmax(self.att(h), dim=1) * h).sum(1)
        logits = self.head(pooled)
        out = {"logits": logits}
        if labels is not None:
            out = {"loss": F.cross_entropy(logits, labels), **out}
        return out


def accuracy(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}


def main():
    set_seed(3)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batch, epochs = 16, 4
    steps_per_epoch = len(SITES) * PER_SITE // (batch * world)

    args = TrainingArguments(
        output_dir=OUT,
        use_cpu=True,
        ddp_backend="gloo",
        seed=3,
        max_steps=epochs * steps_per_epoch,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=60,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=steps_per_epoch,
        save_strategy="no",
        logging_steps=steps_per_epoch,
        remove_unused_columns=False,
        label_names=["labels"],
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=Router(),
        args=args,
        train_dataset=TicketStream(SITES[rank::world], seed=3),
        eval_dataset=Held(SITES),
        compute_metrics=accuracy,
    )
    trainer.train()
    final = trainer.evaluate()
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in final.items() if k in ("eval_loss", "eval_accuracy")})
    trainer.save_model(OUT)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
