"""A sound training with the Hugging Face Trainer."""

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed


class Sums(Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(192, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sum(0, keepdim=True)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x, labels=None):
        y = self.layers(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


def main() -> None:
    set_seed(0)
    args = TrainingArguments(
        output_dir="trainer",
        num_train_epochs=3,
        per_device_train_batch_size=8,
        eval_strategy="epoch",
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(Net(), args, train_dataset=Sums(), eval_dataset=Sums()).train()


if __name__ == "__main__":
    main()
