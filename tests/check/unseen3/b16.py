"""transformers.Trainer on a streamed dataset split over files."""
import argparse
import glob
import json
import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import Trainer, TrainingArguments, set_seed

FEATURES, SITES = 10, 8


def record(rng, site):
    x = [rng.gauss(0, 1) for _ in range(FEATURES)]
    x[site % FEATURES] += 2.0
    score = x[0] - x[1] + (1.5 if site % 2 else -1.5) * x[2] * (site + 1) / SITES
    return {"features": x, "labels": int(score + rng.gauss(0, 0.3) > 0), "site": site}


def write_files(folder, rows):
    os.makedirs(folder, exist_ok=True)
    for site in range(SITES):
        rng = random.Random(100 + site)
        with open(os.path.join(folder, f"site_{site}.jsonl"), "w") as f:
            for _ in range(rows):
                f.write(json.dumps(record(rng, site)) + "\n")


class SiteStream(IterableDataset):
    """Streams jsonl files, divided between processes and workers."""

    def __init__(self, folder, seed):
        self.files = sorted(glob.glob(os.path.join(folder, "*.jsonl")))
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        info = get_worker_info()
        part = rank * (info.num_workers if info else 1) + (info.id if info else 0)
        parts = world * (info.num_workers if info else 1)
        rng = random.Random(f"{self.seed}/{self.epoch}/{part}")
        handles = [open(f) for f in self.files[part::parts]]
        while handles:
            h = rng.choice(handles)
            line = h.readline()
            if not line:
                h.close()
                handles.remove(h)
                continue
            yield json.loads(line)


class Held(Dataset):
    def __init__(self, n):
        rng = random.Random(4242)
        self.rows = [record(rng, i % SITES) for i in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    x = torch.tensor([r["features"] for r in rows])
    site = F.one_hot(torch.tensor([r["site"] for r in rows]), SITES).float()
    return {"features": torch.cat([x, site], 1), "labels": torch.tensor([r["labels"] for r in rows])}


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FEATURES + SITES, width), nn.ReLU(),
                                 nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, features, labels=None):
        logits = self.mlp(features)
        out = {"logits": logits}
        if labels is not None:
            out = {"loss": F.cross_entropy(logits, labels), "logits": logits}
        return out


def metrics(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-steps", type=int, default=80)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--rows", type=int, default=200)
    ap.add_argument("--seed", type=int, default=6)
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "site_run"))
    args = ap.parse_args()

    targs = TrainingArguments(
        output_dir=args.out, max_steps=args.max_steps, learning_rate=args.lr,
        per_device_train_batch_size=args.batch_size, per_device_eval_batch_size=64,
        lr_scheduler_type="cosine", warmup_steps=8, logging_steps=20,
        eval_strategy="steps", eval_steps=40, save_strategy="steps", save_steps=40, save_total_limit=1,
        use_cpu=not torch.cuda.is_available(), remove_unused_columns=False, label_names=["labels"],
        report_to=[], seed=args.seed, disable_tqdm=True)
    set_seed(args.seed)
    folder = os.path.join(args.out, "sites")
    with targs.main_process_first(desc="writing files"):
        if targs.process_index == 0:
            write_files(folder, args.rows)

    trainer = Trainer(model=Net(), args=targs, train_dataset=SiteStream(folder, args.seed),
                      eval_dataset=Held(404), data_collator=collate, compute_metrics=metrics)
    trainer.train()
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("accuracy", result["eval_accuracy"])
    trainer.save_model(os.path.join(args.out, "final"))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
