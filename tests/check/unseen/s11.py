"""Sentiment-like toy text classification (Lightning)."""
import os
import tempfile
from argparse import ArgumentParser

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    def __init__(self, n, seed, vocab=120, length=24):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 2, (n,), generator=g)
        ids = torch.randint(2, vocab, (n, length), generator=g)
        cue = torch.rand(n, length, generator=g) < 0.12
        polar = torch.randint(2, 20, (n, length), generator=g) + 30 * self.y[:, None]
        self.ids = torch.where(cue, polar, ids)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.ids[i], self.y[i]


class SentimentModel(L.LightningModule):
    def __init__(self, vocab=120, dim=32, lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.emb = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * dim, 2)

    def forward(self, ids):
        h, _ = self.gru(self.emb(ids))
        return self.fc(h.mean(1))

    def training_step(self, batch, batch_idx):
        ids, y = batch
        return F.cross_entropy(self(ids), y)

    def validation_step(self, batch, batch_idx):
        ids, y = batch
        logits = self(ids)
        loss = F.cross_entropy(logits, y)
        acc = (logits.argmax(-1) == y).float().mean()
        self.log("val_loss", loss, on_epoch=True, prog_bar=True)
        self.log("val_acc", acc, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)]


class PrintMetrics(L.Callback):
    def on_validation_end(self, trainer, module):
        if trainer.is_global_zero and not trainer.sanity_checking:
            m = trainer.callback_metrics
            print(f"epoch {trainer.current_epoch} val_loss {m['val_loss']:.4f} val_acc {m['val_acc']:.4f}", flush=True)


def cli_main():
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "sentiment_ckpt"))
    args = parser.parse_args()

    L.seed_everything(0)
    train = DataLoader(Reviews(1280, 0), batch_size=args.batch_size, shuffle=True)
    val = DataLoader(Reviews(256, 1), batch_size=64)
    best = ModelCheckpoint(dirpath=args.out, filename="best", monitor="val_loss", mode="min", save_weights_only=True)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy="ddp",
        callbacks=[best, PrintMetrics()],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(SentimentModel(), train, val)
    if trainer.is_global_zero:
        print(f"best val_loss {best.best_model_score:.4f}")


if __name__ == "__main__":
    cli_main()
