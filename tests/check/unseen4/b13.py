"""Sequence tagging student trained on cached teacher logits plus gold tags (Hugging Face Trainer)."""
import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments, set_seed

VOCAB, TAGS, PAD = 80, 6, 0


class TaggedSentences(Dataset):
    """tag depends on the token and its left neighbour; the teacher is the true conditional, tempered."""

    def __init__(self, n, seed):
        table = np.random.default_rng(0).normal(0, 1.5, (2, VOCAB, TAGS))
        rng = np.random.default_rng(seed)
        self.rows = []
        for _ in range(n):
            length = int(np.clip(rng.lognormal(2.2, 0.7), 3, 40))
            ids = rng.integers(1, VOCAB, length)
            left = np.concatenate([[1], ids[:-1]])
            logits = table[0][ids] + table[1][left]
            gumbel = rng.gumbel(size=logits.shape)
            tags = (logits + 0.5 * gumbel).argmax(-1)
            self.rows.append((ids, tags, logits.astype("float32")))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    n, width = len(rows), max(len(r[0]) for r in rows)
    ids = torch.full((n, width), PAD)
    labels = torch.full((n, width), -100)
    soft = torch.zeros(n, width, TAGS)
    for i, (x, t, s) in enumerate(rows):
        ids[i, :len(x)] = torch.from_numpy(x)
        labels[i, :len(x)] = torch.from_numpy(t)
        soft[i, :len(x)] = torch.from_numpy(s)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels, "teacher_logits": soft}


class DistillationTrainer(Trainer):
    def __init__(self, *args, alpha=0.7, temperature=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        teacher, labels = inputs.pop("teacher_logits"), inputs.pop("labels")
        outputs = model(**inputs)
        mask = labels != -100
        student, teacher, gold = outputs.logits[mask], teacher[mask], labels[mask]
        t = self.temperature
        kd = F.kl_div(F.log_softmax(student / t, -1), F.log_softmax(teacher / t, -1),
                      reduction="sum", log_target=True) * t * t
        ce = F.cross_entropy(student, gold, reduction="sum")
        loss = self.alpha * kd + (1 - self.alpha) * ce
        # token-level normalisation, exact under gradient accumulation
        loss = loss / (num_items_in_batch if num_items_in_batch is not None else mask.sum())
        return (loss, outputs) if return_outputs else loss


def compute_metrics(pred):
    guess = pred.predictions.argmax(-1)
    keep = pred.label_ids != -100
    return {"token_acc": float((guess == pred.label_ids)[keep].mean()), "tokens": int(keep.sum())}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=float, default=3)
    ap.add_argument("--lr", type=float, default=0.15)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--alpha", type=float, default=0.7)
    ap.add_argument("--seed", type=int, default=42)
    a = ap.parse_args()

    args = TrainingArguments(
        output_dir="out/tagger", num_train_epochs=a.epochs, per_device_train_batch_size=a.batch,
        per_device_eval_batch_size=64, gradient_accumulation_steps=a.accum, learning_rate=a.lr, optim="sgd",
        max_grad_norm=5.0, lr_scheduler_type="linear", warmup_steps=4, eval_strategy="epoch", save_strategy="epoch",
        save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="token_acc", greater_is_better=True,
        logging_steps=5, remove_unused_columns=False, report_to=[], use_cpu=True, ddp_backend="gloo",
        ddp_find_unused_parameters=False, seed=a.seed, disable_tqdm=True)
    set_seed(args.seed)

    config = BertConfig(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=1, num_attention_heads=4,
                        intermediate_size=96, max_position_embeddings=48, num_labels=TAGS,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    student = BertForTokenClassification(config)
    trainer = DistillationTrainer(
        model=student, args=args, train_dataset=TaggedSentences(960, 1), eval_dataset=TaggedSentences(200, 2),
        data_collator=collate, compute_metrics=compute_metrics, alpha=a.alpha)
    trainer.train()
    metrics = trainer.evaluate(TaggedSentences(150, 3), metric_key_prefix="test")
    trainer.save_model("out/tagger/final")
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in metrics.items()}, flush=True)


if __name__ == "__main__":
    main()
