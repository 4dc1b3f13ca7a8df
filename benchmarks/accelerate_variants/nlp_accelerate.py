"""A BERT classifier of pairs, as Accelerate's documentation writes it; started by torchrun: nlp_accelerate.py EPOCHS"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import BATCH_PER_PROCESS, EVAL_BATCH, SEED, Stopwatch, bert, pairs, train_tokenizer
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


def get_dataloaders(accelerator, batch_size):
    data = pairs()
    tokenizer = train_tokenizer(data)

    def tokenize_function(examples):
        return tokenizer(examples["sentence1"], examples["sentence2"], truncation=True, max_length=None)

    with accelerator.main_process_first():
        tokenized = data.map(tokenize_function, batched=True, remove_columns=["sentence1", "sentence2"])
    tokenized = tokenized.rename_column("label", "labels")

    def collate_fn(examples):
        return tokenizer.pad(examples, padding="longest", return_tensors="pt")

    train_dataloader = DataLoader(tokenized["train"], shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
    eval_dataloader = DataLoader(tokenized["test"], shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH)
    return train_dataloader, eval_dataloader, len(tokenizer)


def training_function(config):
    accelerator = Accelerator(cpu=True)
    lr, num_epochs, batch_size = config["lr"], config["num_epochs"], config["batch_size"]
    set_seed(config["seed"])
    train_dataloader, eval_dataloader, vocab_size = get_dataloaders(accelerator, batch_size)
    model = bert(vocab_size)
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=100,
        num_training_steps=len(train_dataloader) * num_epochs,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    watch = Stopwatch()
    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            batch.to(accelerator.device)
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            watch.step()
        model.eval()
        correct = total = 0
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"epoch {epoch}: {correct / total:.4f}")
    if accelerator.is_main_process:
        watch.report(correct / total)
    watch.leave(accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    training_function({"lr": 5e-4, "num_epochs": int(sys.argv[1]), "seed": SEED, "batch_size": BATCH_PER_PROCESS})
