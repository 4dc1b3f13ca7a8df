import argparse

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Palindromes(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        half = torch.randint(1, 20, (n, 6), generator=g)
        self.labels = torch.randint(0, 2, (n,), generator=g)
        other = torch.where(self.labels[:, None] == 1, half.flip(1), torch.randint(1, 20, (n, 6), generator=g))
        self.ids = torch.cat([half, other], 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def build_model():
    config = BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output_dir", default="runs/palindromes")
    cli = parser.parse_args()
    set_seed(5)
    model = build_model()
    args = TrainingArguments(
        output_dir=cli.output_dir,
        num_train_epochs=cli.epochs,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        dataloader_num_workers=1,
        ddp_find_unused_parameters=False,
        ddp_timeout=600,
        average_tokens_across_devices=False,  # the loss is a mean over sequences
        seed=5,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Palindromes(512, 1), eval_dataset=Palindromes(128, 2), compute_metrics=metrics)
    trainer.train()
    result = trainer.evaluate()
    torch.save(trainer.model.state_dict(), f"{cli.output_dir}/final.pt")
    if trainer.is_world_process_zero():
        print(f"accuracy {result['eval_accuracy']:.3f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
