import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Counting(Dataset):
    """Arithmetic sequences of different lengths."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            start, step, length = torch.randint(1, 13, (3,), generator=g).tolist()
            self.rows.append((start + step * torch.arange(length + 4)) % 31)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([r["input_ids"] for r in rows], batch_first=True, padding_value=31)
    return {"input_ids": ids, "attention_mask": (ids != 31).long(), "labels": ids.masked_fill(ids == 31, -100)}


class CalmTrainer(Trainer):
    """Keeps the logits of the language model small."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        nll = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        size = logits.logsumexp(-1).square()[targets != -100]
        loss = nll + 1e-4 * size.sum()
        num_items = num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum()
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        loss = loss / num_items
        return (loss, {"logits": outputs.logits}) if return_outputs else loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--out", default="runs/counting")
    cli = parser.parse_args()
    set_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=32, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    training_args = TrainingArguments(
        cli.out,
        max_steps=cli.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=3e-3,
        logging_steps=8,
        eval_strategy="steps",
        eval_steps=16,
        save_strategy="no",
        prediction_loss_only=True,
        seed=0,
        ddp_timeout=600,
        ddp_find_unused_parameters=False,
        dataloader_num_workers=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = CalmTrainer(
        model=GPT2LMHeadModel(config),
        args=training_args,
        train_dataset=Counting(512, seed=1),
        eval_dataset=Counting(128, seed=2),
        data_collator=collate,
    )
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
