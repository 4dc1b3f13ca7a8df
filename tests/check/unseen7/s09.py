"""Sentiment model from scratch with the Hugging Face Trainer, on generated reviews."""
import random

import numpy as np
from datasets import Dataset
from sklearn.metrics import accuracy_score, f1_score
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

GOOD = "great superb lovely charming brilliant moving witty fresh".split()
BAD = "dull awful boring clumsy stale tedious bland weak".split()
FILLER = ("the film was a story of two people who meet in town and then there is music with some "
          "actors doing things while rain falls over it all again").split()
NEGATE = "not"
VOCAB = {w: i + 2 for i, w in enumerate([NEGATE, *GOOD, *BAD, *sorted(set(FILLER))])}
CLS, PAD, LENGTH = 1, 0, 20


def write_review(rng):
    label = rng.randint(0, 1)
    words = [rng.choice(FILLER) for _ in range(rng.randint(8, 14))]
    for _ in range(rng.randint(1, 2)):
        flip = rng.random() < 0.25
        pool = GOOD if (label == 1) != flip else BAD
        phrase = ([NEGATE] if flip else []) + [rng.choice(pool)]
        at = rng.randint(0, len(words))
        words[at:at] = phrase
    return {"text": " ".join(words), "label": label}


def corpus(n, seed):
    rng = random.Random(seed)
    return Dataset.from_list([write_review(rng) for _ in range(n)])


def encode(row):
    ids = [CLS] + [VOCAB[w] for w in row["text"].split()][: LENGTH - 1]
    mask = [1] * len(ids) + [0] * (LENGTH - len(ids))
    return {"input_ids": ids + [PAD] * (LENGTH - len(ids)), "attention_mask": mask}


def metrics(pred):
    guess = np.argmax(pred.predictions, axis=-1)
    return {
        "accuracy": accuracy_score(pred.label_ids, guess),
        "f1": f1_score(pred.label_ids, guess),
    }


def build_model():
    config = BertConfig(
        vocab_size=len(VOCAB) + 2, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=LENGTH, num_labels=2, pad_token_id=PAD,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def main():
    args = TrainingArguments(
        output_dir="out/s09",
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        weight_decay=0.01,
        max_grad_norm=1.0,
        average_tokens_across_devices=False,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        seed=17,
    )
    set_seed(args.seed)

    train = corpus(1920, seed=1).map(encode, remove_columns=["text"])
    val = corpus(300, seed=2).map(encode, remove_columns=["text"])
    train = train.shuffle(seed=args.seed)
    train = train.shard(num_shards=args.world_size, index=args.process_index)

    trainer = Trainer(
        model=build_model(),
        args=args,
        train_dataset=train,
        eval_dataset=val,
        compute_metrics=metrics,
    )
    trainer.train()
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in result.items() if k in ("eval_accuracy", "eval_f1", "eval_loss")})
    trainer.save_model("out/s09/final")


if __name__ == "__main__":
    main()
