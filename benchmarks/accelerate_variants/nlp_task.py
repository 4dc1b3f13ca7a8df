"""The same BERT classifier of pairs as a Task: instep train nlp_task.py -n 2 --batch-size 32"""

from dataclasses import dataclass

from common import bert, pairs, train_tokenizer
from torch.optim import AdamW
from transformers import get_linear_schedule_with_warmup

import instep


@dataclass(kw_only=True)
class Pairs(instep.Task):
    """Which one of two lines is argparse's?"""

    lr: float = 5e-4

    def __post_init__(self):
        data = pairs()
        self.tokenizer = train_tokenizer(data)
        data = data.map(self.tokenize, batched=True, remove_columns=["sentence1", "sentence2"])
        self.data = data.rename_column("label", "labels")

    def tokenize(self, examples):
        return self.tokenizer(examples["sentence1"], examples["sentence2"], truncation=True, max_length=None)

    def collate(self, examples):
        return self.tokenizer.pad(examples, padding="longest", return_tensors="pt")

    def model(self):
        return bert(len(self.tokenizer))

    def optimizer(self, params):
        return AdamW(params, lr=self.lr)

    def scheduler(self, optimizer, num_steps):
        return get_linear_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=num_steps)

    def train_data(self):
        return self.data["train"]

    def eval_data(self):
        return self.data["test"]

    def loss(self, model, batch):
        return model(**batch).loss

    def metrics(self, model, batch):
        return {"accuracy": model(**batch).logits.argmax(-1) == batch["labels"]}
