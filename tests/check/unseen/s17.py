import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Majority(Dataset):
    """0/1 strings; label = majority of the first five bits, 15% of them flipped."""

    def __init__(self, n, seed, length=10):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 2, (n, length), generator=g)
        clean = (self.ids[:, :5].sum(1) > 2).long()
        self.labels = torch.where(torch.rand(n, generator=g) < 0.15, 1 - clean, clean)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


class TextModel(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb = nn.Embedding(2, dim)
        self.pos = nn.Parameter(torch.randn(10, dim) * 0.1)
        self.att = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.0, batch_first=True)
        self.cls = nn.Linear(dim * 10, 2)

    def forward(self, input_ids, labels=None):
        logits = self.cls(self.att(self.emb(input_ids) + self.pos).flatten(1))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return loss, logits


def training_function(config):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(config["seed"])
    train_dataloader = DataLoader(Majority(1280, 0), shuffle=True, batch_size=config["batch_size"])
    eval_dataloader = DataLoader(Majority(277, 1), shuffle=False, batch_size=config["eval_batch_size"])
    model = TextModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])

    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )

    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            loss, _ = model(**batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        all_predictions, all_labels = [], []
        for batch in eval_dataloader:
            with torch.no_grad():
                _, logits = model(**batch)
            predictions = logits.argmax(dim=-1)
            all_predictions.append(accelerator.gather(predictions))
            all_labels.append(accelerator.gather(batch["labels"]))
        predictions = torch.cat(all_predictions)
        labels = torch.cat(all_labels)
        accuracy = (predictions == labels).float().mean().item()
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.4f}")

    accelerator.end_training()


def main():
    config = {"lr": 3e-3, "num_epochs": 3, "seed": 42, "batch_size": 32, "eval_batch_size": 32}
    training_function(config)


if __name__ == "__main__":
    main()
