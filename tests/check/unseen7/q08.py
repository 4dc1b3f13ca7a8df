"""Fine-grained topic classification of token sequences with the Hugging Face Trainer."""
import numpy as np
import torch
from datasets import Dataset
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

TOPICS = 6
VOCAB = 300
LENGTH = 24


def make_corpus(n=1200, seed=0):
    rng = np.random.default_rng(seed)
    profile = rng.dirichlet(np.full(VOCAB - 4, 0.15), size=TOPICS)
    background = rng.dirichlet(np.full(VOCAB - 4, 1.0))
    rows = {"input_ids": [], "attention_mask": [], "label": []}
    for i in range(n):
        label = i % TOPICS
        size = int(rng.integers(10, LENGTH))
        mix = 0.5 * profile[label] + 0.5 * background
        words = rng.choice(VOCAB - 4, size=size, p=mix) + 4
        ids = [1, *words.tolist()] + [0] * (LENGTH - 1 - size)
        if rng.random() < 0.08:
            label = int(rng.integers(TOPICS))
        rows["input_ids"].append(ids)
        rows["attention_mask"].append([int(t != 0) for t in ids])
        rows["label"].append(label)
    return Dataset.from_dict(rows)


def compute_metrics(pred):
    guess = pred.predictions.argmax(-1)
    return {
        "accuracy": accuracy_score(pred.label_ids, guess),
        "macro_f1": f1_score(pred.label_ids, guess, average="macro"),
    }


def build_model():
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.08,
        num_labels=TOPICS,
    )
    return BertForSequenceClassification(config)


def main():
    torch.set_num_threads(1)
    corpus = make_corpus()
    parts = corpus.train_test_split(test_size=0.2)

    args = TrainingArguments(
        output_dir="out/q08",
        use_cpu=True,
        ddp_backend="gloo",
        seed=42,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=40,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=9,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="macro_f1",
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        average_tokens_across_devices=False,
    )
    trainer = Trainer(
        model_init=build_model,
        args=args,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        compute_metrics=compute_metrics,
    )
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)

    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model("out/q08/best")


if __name__ == "__main__":
    main()
