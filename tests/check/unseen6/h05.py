"""Toy support-ticket router: a tiny BERT from scratch under the Hugging Face Trainer."""
import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    BertConfig, BertForSequenceClassification, EarlyStoppingCallback, Trainer, TrainerCallback,
    TrainingArguments, set_seed)

NAME = "out/h05"
CLASSES = ["billing", "login", "delivery", "other"]
VOCAB, PAD, CLS = 120, 0, 1


def tickets(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.choice(4, size=n, p=[0.45, 0.25, 0.2, 0.1])
    rows = []
    for lab in labels:
        length = int(rng.integers(6, 24))
        own = rng.integers(10 + 25 * lab, 35 + 25 * lab, size=length)
        noise = rng.integers(2, VOCAB, size=length)
        words = np.where(rng.random(length) < 0.3, own, noise)
        rows.append({"input_ids": [CLS] + words.tolist(), "labels": int(lab)})
    return Dataset.from_list(rows)


def collate(rows):
    width = max(len(r["input_ids"]) for r in rows)
    ids = torch.full((len(rows), width), PAD)
    for i, r in enumerate(rows):
        ids[i, : len(r["input_ids"])] = torch.tensor(r["input_ids"])
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": torch.tensor([r["labels"] for r in rows]),
    }


def class_weights(ds):
    counts = np.bincount(ds["labels"], minlength=len(CLASSES))
    return torch.tensor(np.sqrt(counts.mean() / counts), dtype=torch.float32)


def make_loss(weights):
    def loss_fn(outputs, labels, num_items_in_batch=None):
        per_item = F.cross_entropy(outputs.logits, labels, reduction="none") * weights[labels]
        if num_items_in_batch is None:
            return per_item.mean()
        return per_item.sum() / num_items_in_batch

    return loss_fn


def metrics(pred):
    guess = pred.predictions.argmax(-1)
    return {
        "accuracy": accuracy_score(pred.label_ids, guess),
        "macro_f1": f1_score(pred.label_ids, guess, average="macro", zero_division=0),
    }


class Console(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **kw):
        if state.is_world_process_zero and metrics:
            print({k: round(v, 4) for k, v in metrics.items() if k.endswith(("_loss", "_f1", "accuracy"))}, flush=True)


def main():
    args = TrainingArguments(
        output_dir=NAME,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=6,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="macro_f1",
        greater_is_better=True,
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=5,
    )
    set_seed(args.seed)
    with args.main_process_first(desc="building the tables"):
        train, val, test = tickets(1280, 1), tickets(301, 2), tickets(211, 3)

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32, pad_token_id=PAD, num_labels=len(CLASSES), hidden_dropout_prob=0.05)
    model = BertForSequenceClassification(config)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=val,
        data_collator=collate,
        compute_loss_func=make_loss(class_weights(train)),
        compute_metrics=metrics,
        callbacks=[Console(), EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    report = trainer.predict(test, metric_key_prefix="test").metrics
    trainer.save_model(os.path.join(NAME, "final"))
    if trainer.is_world_process_zero():
        print("test macro F1", round(report["test_macro_f1"], 4))


if __name__ == "__main__":
    main()
