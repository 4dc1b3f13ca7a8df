"""Imbalanced sequence classification: BERT + class-weighted loss in a custom Trainer."""
import os
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Toy(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.y = (rng.random(n) < 0.2).astype(np.int64)
        ids = rng.integers(5, 60, size=(n, 16))
        marked = rng.random((n, 16)) < 0.3
        self.ids = np.where(marked & (self.y[:, None] == 1), rng.integers(60, 70, size=(n, 16)), ids)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        ids = torch.from_numpy(self.ids[i])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(self.y[i])}


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = self.class_weights.to(outputs.logits.device)
        per_row = F.cross_entropy(outputs.logits, labels, reduction="none") * weights[labels]
        loss = per_row.mean()
        return (loss, outputs) if return_outputs else loss


def compute_metrics(p):
    pred = p.predictions.argmax(-1)
    pos = p.label_ids == 1
    return {"accuracy": float((pred == p.label_ids).mean()), "recall": float((pred[pos] == 1).mean())}


def main():
    set_seed(11)
    config = BertConfig(vocab_size=70, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, max_position_embeddings=16, num_labels=2,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(config)
    args = TrainingArguments(
        output_dir=os.path.join(tempfile.gettempdir(), "weighted_bert"),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        gradient_accumulation_steps=4,
        num_train_epochs=3,
        optim="sgd",
        learning_rate=0.05,
        max_grad_norm=0.0,
        lr_scheduler_type="linear",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = WeightedTrainer(
        model=model, args=args, train_dataset=Toy(1024, 0), eval_dataset=Toy(203, 1),
        compute_metrics=compute_metrics, class_weights=torch.tensor([0.6, 2.4]))
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in metrics.items() if "acc" in k or "recall" in k})


if __name__ == "__main__":
    main()
