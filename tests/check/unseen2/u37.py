"""Trainer job for a shared queue: must hand the node back within its slot."""
import argparse
import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Charges(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 18, generator=g)
        w = torch.sin(torch.arange(18).float())
        self.y = (self.x @ w + self.x[:, 0] * self.x[:, 3]).unsqueeze(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"features": self.x[i], "labels": self.y[i]}


class Regressor(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(18, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, features, labels=None):
        pred = self.net(features)
        out = {"logits": pred}
        if labels is not None:
            out = {"loss": nn.functional.mse_loss(pred, labels), "logits": pred}
        return out


class SlotCallback(TrainerCallback):
    """Ends training shortly before the queue slot runs out and leaves a checkpoint behind."""

    def __init__(self, slot_seconds, margin=0.1):
        self.deadline = time.monotonic() + slot_seconds * (1 - margin)

    def on_step_end(self, args, state, control, **kw):
        if time.monotonic() > self.deadline:
            control.should_save = True
            control.should_training_stop = True
        return control


class ThroughputCallback(TrainerCallback):
    def on_train_begin(self, args, state, control, **kw):
        self.t0 = time.monotonic()

    def on_train_end(self, args, state, control, **kw):
        if state.is_world_process_zero:
            print(f"{state.global_step} steps, {state.global_step / (time.monotonic() - self.t0):.0f} steps/s", flush=True)


def r2(p):
    y, f = p.label_ids, p.predictions
    return {"r2": float(1 - ((y - f) ** 2).sum() / ((y - y.mean()) ** 2).sum())}


def training_arguments(cli):
    return TrainingArguments(
        output_dir=cli.out,
        use_cpu=True,
        num_train_epochs=cli.epochs,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=cli.lr,
        weight_decay=0.01,
        warmup_steps=5,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        logging_steps=20,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        seed=cli.seed,
    )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=float, default=3)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--slot-minutes", type=float, default=30.0)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "charges_trainer"))
    cli = ap.parse_args()
    set_seed(cli.seed)

    trainer = Trainer(
        model=Regressor(),
        args=training_arguments(cli),
        train_dataset=Charges(640, 1),
        eval_dataset=Charges(130, 2),
        compute_metrics=r2,
        callbacks=[SlotCallback(cli.slot_minutes * 60), ThroughputCallback()],
    )
    trainer.train(resume_from_checkpoint=cli.resume or None)
    scores = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print("r2", round(scores["eval_r2"], 4), flush=True)
    trainer.accelerator.wait_for_everyone()
    if torch.distributed.is_initialized():
        time.sleep(0.5)  # let the gloo threads finish
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
