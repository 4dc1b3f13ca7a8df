"""Train a tiny GPT-2 on a streamed corpus with the Hugging Face Trainer."""
import argparse
import math
import os
import random

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

VOCAB = 64


def make_documents(n, seq_len, seed):
    """Markov-chain documents over a handful of "dialects"."""
    g = torch.Generator().manual_seed(0)
    dialects = torch.softmax(2.5 * torch.randn(6, VOCAB, VOCAB, generator=g), dim=-1)
    g.manual_seed(seed)
    kind = torch.randint(0, len(dialects), (n,), generator=g)
    tokens = [torch.randint(0, VOCAB, (n,), generator=g)]
    for _ in range(seq_len - 1):
        probs = dialects[kind, tokens[-1]]
        tokens.append(torch.multinomial(probs, 1, generator=g).squeeze(1))
    return torch.stack(tokens, dim=1).tolist()


class StreamingCorpus(IterableDataset):
    """Reads documents in order and shuffles them through a small buffer."""

    def __init__(self, documents, buffer_size=128, seed=0):
        self.documents = documents
        self.buffer_size = buffer_size
        self.seed = seed
        self.epoch = 0
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _read(self):
        info = get_worker_info()
        n_workers, worker = (info.num_workers, info.id) if info else (1, 0)
        shard = self.rank * n_workers + worker
        n_shards = self.world_size * n_workers
        for i, doc in enumerate(self.documents):
            if i % n_shards == shard:
                yield doc

    def __iter__(self):
        rng = random.Random(self.seed * 9973 + self.epoch)
        buffer = []
        for doc in self._read():
            if len(buffer) < self.buffer_size:
                buffer.append(doc)
                continue
            j = rng.randrange(self.buffer_size)
            out, buffer[j] = buffer[j], doc
            yield {"input_ids": out, "labels": out}
        rng.shuffle(buffer)
        for doc in buffer:
            yield {"input_ids": doc, "labels": doc}


class ListDataset(Dataset):
    def __init__(self, documents):
        self.documents = documents

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, i):
        return {"input_ids": self.documents[i], "labels": self.documents[i]}


def collate(features):
    return {k: torch.tensor([f[k] for f in features]) for k in features[0]}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--num_docs", type=int, default=640)
    ap.add_argument("--seq_len", type=int, default=32)
    ap.add_argument("--batch_size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=13)
    ap.add_argument("--output_dir", default="./out/a05")
    args = ap.parse_args()

    set_seed(args.seed)
    world = int(os.environ.get("WORLD_SIZE", 1))
    train_docs = make_documents(args.num_docs, args.seq_len, seed=1)
    eval_docs = make_documents(128, args.seq_len, seed=2)
    max_steps = args.epochs * args.num_docs // (args.batch_size * world)

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=args.seq_len, n_embd=48, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=32,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        eval_strategy="steps",
        eval_steps=max_steps // args.epochs,
        save_strategy="no",
        logging_steps=10,
        disable_tqdm=True,
        report_to=[],
        seed=args.seed,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=StreamingCorpus(train_docs, seed=args.seed),
        eval_dataset=ListDataset(eval_docs),
        data_collator=collate,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"final eval loss {metrics['eval_loss']:.4f} ppl {math.exp(metrics['eval_loss']):.2f}")
    trainer.save_model(os.path.join(args.output_dir, "final"))


if __name__ == "__main__":
    main()
