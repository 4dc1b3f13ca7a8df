"""Fine-tune-style script: tiny BERT classifier over token ids with the HF Trainer."""
import json
import os

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

OUT = "./out/c10"
VOCAB, MAXLEN = 200, 24


def build_cache(path):
    rng = np.random.default_rng(17)
    theme = rng.dirichlet(np.full(VOCAB - 4, 0.15), size=4)
    data = {}
    for split, n in (("train", 1024), ("dev", 203), ("test", 157)):
        y = rng.integers(0, 4, size=n)
        length = rng.integers(8, MAXLEN, size=n)
        ids = np.zeros((n, MAXLEN), dtype=np.int64)
        for i in range(n):
            mix = 0.6 * theme[y[i]] + 0.4 / (VOCAB - 4)
            ids[i, 0] = 1
            ids[i, 1:length[i]] = 4 + rng.choice(VOCAB - 4, size=length[i] - 1, p=mix / mix.sum())
        data[split + "_ids"], data[split + "_y"] = ids, y
    np.savez(path, **data)


class Rows(Dataset):
    def __init__(self, ids, labels):
        self.ids, self.labels = torch.from_numpy(ids), torch.from_numpy(labels)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {
            "input_ids": self.ids[i],
            "attention_mask": (self.ids[i] != 0).long(),
            "labels": self.labels[i],
        }


class History(TrainerCallback):
    def __init__(self):
        self.rows = []

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero:
            self.rows.append({"epoch": state.epoch, **metrics})
            print({k: round(v, 4) for k, v in metrics.items() if k in ("eval_loss", "eval_accuracy")}, flush=True)


def compute_metrics(p):
    pred = p.predictions.argmax(-1)
    return {"accuracy": float((pred == p.label_ids).mean())}


def main():
    args = TrainingArguments(
        output_dir=OUT,
        use_cpu=True,
        ddp_backend="gloo",
        num_train_epochs=3,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_strategy="no",
        average_tokens_across_devices=False,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    cache = os.path.join(OUT, "data.npz")
    with args.main_process_first(desc="build cache"):
        if not os.path.exists(cache):
            os.makedirs(OUT, exist_ok=True)
            build_cache(cache)
    z = np.load(cache)
    train, dev, test = (Rows(z[s + "_ids"], z[s + "_y"]) for s in ("train", "dev", "test"))

    set_seed(args.seed)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=MAXLEN, num_labels=4, pad_token_id=0,
    )
    history = History()
    trainer = Trainer(
        model=BertForSequenceClassification(config), args=args, train_dataset=train, eval_dataset=dev,
        compute_metrics=compute_metrics, callbacks=[history],
    )
    trainer.train()
    trainer.save_model(os.path.join(OUT, "final"))

    result = trainer.predict(test)
    if trainer.is_world_process_zero():
        pred = result.predictions.argmax(-1)
        assert len(pred) == len(test)
        with open(os.path.join(OUT, "test_predictions.csv"), "w") as f:
            f.write("row,label\n")
            f.writelines(f"{i},{p}\n" for i, p in enumerate(pred))
        with open(os.path.join(OUT, "history.json"), "w") as f:
            json.dump(history.rows, f, indent=1)
        print("test accuracy", round(result.metrics["test_accuracy"], 4))


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
