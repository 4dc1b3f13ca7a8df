"""Causal LM on a stream of log shards with the Hugging Face Trainer."""
import math
import os
import random

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

SEQ_LEN = 32
NUM_SHARDS = 8
LINES_PER_SHARD = 160
SERVICES = ["auth", "billing", "search", "mail", "cache", "queue", "store", "proxy"]
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz0123456789=:."
STOI = {c: i for i, c in enumerate(ALPHABET)}


def read_shard(k):
    """Stands in for one gzipped file: the log of service k."""
    rng = random.Random(100 + k)
    for _ in range(LINES_PER_SHARD):
        code = rng.choice(["200", "404", "500"])
        yield f"{SERVICES[k]}: status={code} ms={rng.randint(1, 400)} user={rng.choice('abcdef')}{rng.randint(0, 99)}\n"


def encode(text):
    return [STOI[c] for c in text]


class LogStream(IterableDataset):
    """Packs the lines of this worker's shards into fixed-length blocks."""

    def __init__(self, shards, rank=0, world=1, buffer_size=64, seed=0):
        self.shards = shards[rank::world]
        self.buffer_size, self.seed, self.epoch = buffer_size, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def blocks(self, rng):
        order = list(self.shards)
        rng.shuffle(order)
        carry = []
        for k in order:
            for line in read_shard(k):
                carry += encode(line)
                while len(carry) >= SEQ_LEN:
                    yield carry[:SEQ_LEN]
                    carry = carry[SEQ_LEN:]

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        pool = []
        for block in self.blocks(rng):
            if len(pool) < self.buffer_size:
                pool.append(block)
                continue
            j = rng.randrange(self.buffer_size)
            pool[j], block = block, pool[j]
            yield self.as_item(block)
        rng.shuffle(pool)
        yield from map(self.as_item, pool)

    @staticmethod
    def as_item(block):
        ids = torch.tensor(block)
        return {"input_ids": ids, "labels": ids.clone()}


def heldout(per_service=12):
    items = []
    for k, name in enumerate(SERVICES):
        rng = random.Random(9000 + k)
        text = "".join(f"{name}: status={rng.choice(['200', '404', '500'])} ms={rng.randint(1, 400)}\n" for _ in range(2 * per_service))
        ids = encode(text)
        items += [LogStream.as_item(ids[i * SEQ_LEN:(i + 1) * SEQ_LEN]) for i in range(per_service)]
    return items


def main():
    set_seed(13)
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))

    train = LogStream(list(range(NUM_SHARDS)), rank=rank, world=world, seed=13)
    config = GPT2Config(
        vocab_size=len(ALPHABET), n_positions=SEQ_LEN, n_embd=48, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)

    args = TrainingArguments(
        output_dir="out/p11",
        max_steps=60,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=6,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=20,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=13,
    )
    trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=heldout())
    trainer.train()
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"held-out perplexity {math.exp(result['eval_loss']):.3f}")
    trainer.save_model("out/p11/final")


if __name__ == "__main__":
    main()
