"""Causal LM from scratch with the Hugging Face Trainer."""
import math
import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

VOCAB, SEQ = 40, 20


class Counting(Dataset):
    """Sequences a, a+s, a+2s ... modulo the vocabulary, all of the same length."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, VOCAB, (n, 1), generator=g)
        stride = torch.randint(1, 7, (n, 1), generator=g)
        self.ids = (start + stride * torch.arange(SEQ)) % VOCAB

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i].clone()}


def main():
    set_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_positions=SEQ, n_embd=32, n_layer=2, n_head=4,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)

    args = TrainingArguments(
        output_dir=os.path.join(tempfile.gettempdir(), "counting_lm"),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Counting(1024, 0), eval_dataset=Counting(128, 1))
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"final eval loss {metrics['eval_loss']:.4f} ppl {math.exp(metrics['eval_loss']):.3f}")


if __name__ == "__main__":
    main()
