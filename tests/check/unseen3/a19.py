"""Lightning with its own samplers and metrics counted over all processes."""
import argparse
import os
import tempfile

import lightning as L
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler


class Parity(Dataset):
    """Does a marked pair of digits sum to an even number?"""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.digits = torch.randint(6, (n, 6), generator=g)
        self.labels = (self.digits[:, 0] + self.digits[:, 1]) % 2

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.digits[i], self.labels[i]


class StridedSampler(Sampler):
    def __init__(self, length, rank, world):
        self.indices = range(rank, length, world)

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class ParityData(L.LightningDataModule):
    def __init__(self, batch_size, seed, workers):
        super().__init__()
        self.batch_size, self.seed, self.workers = batch_size, seed, workers

    def setup(self, stage=None):
        self.train_set, self.val_set = Parity(1280, seed=1), Parity(501, seed=2)

    def train_dataloader(self):
        sampler = DistributedSampler(self.train_set, num_replicas=self.trainer.world_size,
                                     rank=self.trainer.global_rank, shuffle=True, seed=self.seed, drop_last=True)
        return DataLoader(self.train_set, batch_size=self.batch_size, sampler=sampler, drop_last=True,
                          num_workers=self.workers, persistent_workers=self.workers > 0)

    def val_dataloader(self):
        sampler = StridedSampler(len(self.val_set), self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(self.val_set, batch_size=25, sampler=sampler)


class ParityNet(L.LightningModule):
    def __init__(self, lr, total_steps):
        super().__init__()
        self.save_hyperparameters()
        self.emb = nn.Embedding(6, 16)
        self.net = nn.Sequential(nn.Linear(96, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, digits):
        return self.net(self.emb(digits).flatten(1))

    def training_step(self, batch, _):
        digits, y = batch
        loss = F.cross_entropy(self(digits), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_validation_epoch_start(self):
        self.confusion = torch.zeros(2, 2, dtype=torch.long, device=self.device)

    def validation_step(self, batch, _):
        digits, y = batch
        pred = self(digits).argmax(1)
        self.confusion += torch.bincount(2 * y + pred, minlength=4).view(2, 2)

    def on_validation_epoch_end(self):
        table = self.all_gather(self.confusion).view(-1, 2, 2).sum(0).float()
        tp, fp, fn = table[1, 1], table[0, 1], table[1, 0]
        f1 = 2 * tp / (2 * tp + fp + fn).clamp(min=1)
        self.log("val_f1", f1)
        self.log("val_n", table.sum())
        if not self.trainer.sanity_checking and self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch} f1 {f1:.4f} over {int(table.sum())}", flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.hparams.lr,
                                                        total_steps=self.hparams.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--workers", type=int, default=0)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=27)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    L.seed_everything(args.seed, workers=True)
    out = args.out or os.path.join(tempfile.gettempdir(), "parity_" + os.environ.get("TORCHELASTIC_RUN_ID", "run"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 2))
    world = int(os.environ.get("WORLD_SIZE", local))

    steps_per_epoch = 1280 // world // args.batch_size
    checkpoint = ModelCheckpoint(dirpath=out, filename="{epoch}-{val_f1:.3f}", monitor="val_f1", mode="max")
    trainer = L.Trainer(
        accelerator="auto", devices=local, num_nodes=world // local, strategy="ddp", use_distributed_sampler=False,
        max_epochs=args.epochs, gradient_clip_val=1.0, logger=False, callbacks=[checkpoint],
        enable_progress_bar=False, enable_model_summary=False,
    )
    model = ParityNet(lr=args.lr, total_steps=args.epochs * steps_per_epoch)
    trainer.fit(model, datamodule=ParityData(args.batch_size, args.seed, args.workers))
    if trainer.is_global_zero:
        print("best", checkpoint.best_model_path, f"{checkpoint.best_model_score:.4f}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
