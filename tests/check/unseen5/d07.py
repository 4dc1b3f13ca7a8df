"""Intent classification with a tiny BERT trained from scratch (Hugging Face Trainer)."""
import os
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset
from transformers import (BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer,
                          TrainingArguments, set_seed)

NUM_INTENTS, VOCAB, LENGTH = 6, 200, 16
CLS, SEP, PAD = 1, 2, 0


@dataclass
class DataArgs:
    train_size: int = field(default=1536)
    eval_size: int = field(default=250)
    data_seed: int = field(default=17)


def synth_utterances(n, seed):
    rng = np.random.default_rng(seed)
    rows = {"input_ids": [], "attention_mask": [], "labels": []}
    for _ in range(n):
        label = int(rng.integers(NUM_INTENTS))
        length = int(rng.integers(6, LENGTH - 1))
        words = rng.integers(60, VOCAB, length)
        cue = rng.random(length) < 0.35
        words[cue] = 3 + label * 9 + rng.integers(0, 9, int(cue.sum()))
        ids = [CLS] + words.tolist() + [SEP]
        pad = LENGTH - len(ids)
        rows["input_ids"].append(ids + [PAD] * pad)
        rows["attention_mask"].append([1] * len(ids) + [0] * pad)
        rows["labels"].append(label)
    return rows


def load_corpus(args, rank, world_size):
    train = Dataset.from_dict(synth_utterances(args.train_size, args.data_seed))
    train = train.shuffle(seed=args.data_seed).shard(num_shards=world_size, index=rank)
    dev = Dataset.from_dict(synth_utterances(args.eval_size, args.data_seed + 1))
    return train, dev


def compute_metrics(pred):
    guess = np.argmax(pred.predictions, axis=-1)
    gold = pred.label_ids
    f1 = []
    for c in range(NUM_INTENTS):
        tp = np.sum((guess == c) & (gold == c))
        denom = np.sum(guess == c) + np.sum(gold == c)
        f1.append(2 * tp / denom if denom else 0.0)
    return {"accuracy": float((guess == gold).mean()), "macro_f1": float(np.mean(f1)), "n": int(len(gold))}


def build_model():
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=LENGTH, num_labels=NUM_INTENTS,
        pad_token_id=PAD, initializer_range=0.1)
    return BertForSequenceClassification(config)


def main():
    (data_args,) = HfArgumentParser(DataArgs).parse_args_into_dataclasses()
    training_args = TrainingArguments(
        output_dir="./out/d07",
        use_cpu=True,
        ddp_backend="gloo",
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=6,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        dataloader_drop_last=False,
        average_tokens_across_devices=False,
        seed=17,
    )
    set_seed(training_args.seed)
    train, dev = load_corpus(data_args, training_args.process_index, training_args.world_size)

    trainer = Trainer(
        model=build_model(),
        args=training_args,
        train_dataset=train,
        eval_dataset=dev,
        compute_metrics=compute_metrics,
    )
    result = trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("steps", result.global_step, {k: round(v, 4) for k, v in metrics.items() if isinstance(v, float)})
    trainer.save_model(os.path.join(training_args.output_dir, "final"))
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
