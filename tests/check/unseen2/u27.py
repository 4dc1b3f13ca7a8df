"""Trainer subclass with a weighted loss, a dedicated eval set and checkpoint rotation."""
import argparse
import os
import tempfile
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.modeling_outputs import SequenceClassifierOutput


class GaitConfig(PretrainedConfig):
    model_type = "gait"

    def __init__(self, channels=4, width=16, num_labels=3, **kw):
        super().__init__(num_labels=num_labels, **kw)
        self.channels, self.width = channels, width


class GaitModel(PreTrainedModel):
    config_class = GaitConfig

    def __init__(self, config):
        super().__init__(config)
        self.conv1 = nn.Conv1d(config.channels, config.width, 3, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, padding=1)
        self.out = nn.Linear(config.width, config.num_labels)
        self.post_init()

    def forward(self, signal, labels=None):
        h = torch.relu(self.conv2(torch.relu(self.conv1(signal))))
        logits = self.out(h.amax(-1))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=logits)


class Gait(Dataset):
    def __init__(self, n, seed):
        rs = np.random.RandomState(seed)
        self.y = rs.choice(3, n, p=[0.6, 0.3, 0.1])
        t = np.arange(20)
        base = np.stack([np.sin((0.3 + 0.3 * c) * t) for c in range(3)])
        self.x = (base[self.y][:, None, :] + 0.7 * rs.randn(n, 4, 20)).astype("float32")

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"signal": torch.from_numpy(self.x[i]), "labels": torch.tensor(int(self.y[i]))}


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights, **kw):
        super().__init__(*args, **kw)
        self.class_weights = class_weights

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        out = model(signal=inputs["signal"])
        w = self.class_weights.to(out.logits.device)[labels]
        # fixed denominator (batch size) so that ranks and micro-batches weigh the same
        loss = (w * nn.functional.cross_entropy(out.logits, labels, reduction="none")).sum() / len(labels)
        return (loss, {"logits": out.logits}) if return_outputs else loss


class Announce(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **kw):
        if state.is_world_process_zero:
            print({k: round(v, 4) for k, v in metrics.items() if k in ("eval_loss", "eval_macro_recall")}, flush=True)


def metrics(p):
    guess = p.predictions.argmax(-1)
    rec = [float((guess[p.label_ids == c] == c).mean()) for c in np.unique(p.label_ids)]
    return {"macro_recall": float(np.mean(rec))}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=float, default=2)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "gait_trainer"))
    ap.add_argument("--resume", action="store_true")
    cli = ap.parse_args()
    set_seed(3)
    train, val = Gait(384, 1), Gait(101, 2)
    counts = torch.tensor(np.bincount(train.y, minlength=3), dtype=torch.float32)
    args = TrainingArguments(
        output_dir=cli.out, use_cpu=True, num_train_epochs=cli.epochs, learning_rate=cli.lr,
        per_device_train_batch_size=16, per_device_eval_batch_size=16, warmup_steps=4,
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, logging_steps=8,
        load_best_model_at_end=True, metric_for_best_model="macro_recall", report_to="none",
        disable_tqdm=True, remove_unused_columns=False, label_names=["labels"], seed=3)
    trainer = WeightedTrainer(
        model=GaitModel(GaitConfig()), args=args, train_dataset=train, eval_dataset=val,
        compute_metrics=metrics, callbacks=[Announce()], class_weights=len(train) / (3 * counts))
    trainer.train(resume_from_checkpoint=cli.resume or None)
    final = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print("final macro recall", round(final["eval_macro_recall"], 4))
    trainer.accelerator.wait_for_everyone()
    if torch.distributed.is_initialized():
        time.sleep(0.5)  # let the gloo threads finish
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
