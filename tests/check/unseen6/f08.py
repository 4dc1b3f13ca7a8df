"""Implicit-feedback recommender (BPR) with the Lightning Trainer; leave-one-out hit rate as selection metric."""
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchmetrics import MeanMetric

USERS, ITEMS, LATENT = 301, 200, 6


def interactions(seed=4):
    g = torch.Generator().manual_seed(seed)
    u, v = torch.randn(USERS, LATENT, generator=g), torch.randn(ITEMS, LATENT, generator=g)
    taste = u @ v.t() + 0.5 * torch.randn(USERS, ITEMS, generator=g)
    liked = taste.topk(16, dim=1).indices
    shuffled = torch.stack([row[torch.randperm(16, generator=g)] for row in liked])
    return shuffled[:, :14], shuffled[:, 14], shuffled[:, 15]


class Feedback(pl.LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        self.history, val, test = interactions()
        users = torch.arange(USERS)
        self.train = TensorDataset(users.repeat_interleave(14), self.history.flatten())
        self.val, self.test = TensorDataset(users, val), TensorDataset(users, test)

    def train_dataloader(self):
        sampler = DistributedSampler(
            self.train, self.trainer.world_size, self.trainer.global_rank, shuffle=True, seed=9, drop_last=True
        )
        return DataLoader(self.train, self.batch_size, sampler=sampler, drop_last=True)

    def share(self, data):
        # every user exactly once over all processes, nobody padded
        mine = range(self.trainer.global_rank, len(data), self.trainer.world_size)
        return DataLoader(Subset(data, mine), batch_size=50)

    def val_dataloader(self):
        return self.share(self.val)

    def test_dataloader(self):
        return self.share(self.test)


class BPR(pl.LightningModule):
    def __init__(self, dim=24, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.user, self.item = nn.Embedding(USERS, dim), nn.Embedding(ITEMS, dim)
        self.bias = nn.Embedding(ITEMS, 1)
        for emb in (self.user, self.item):
            nn.init.normal_(emb.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)
        self.val_hit, self.test_hit = MeanMetric(), MeanMetric()

    def score(self, users, items):
        return (self.user(users) * self.item(items)).sum(-1) + self.bias(items).squeeze(-1)

    def on_train_start(self):
        torch.manual_seed(1234 + self.global_rank)  # negatives differ between processes

    def training_step(self, batch, _):
        users, pos = batch
        neg = torch.randint(0, ITEMS, pos.shape, device=pos.device)
        loss = -F.logsigmoid(self.score(users, pos) - self.score(users, neg)).mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def hits(self, batch, k=20):
        users, held_out = batch
        scores = self.user(users) @ self.item.weight.t() + self.bias.weight.t()
        scores = scores.scatter(1, self.trainer.datamodule.history[users], float("-inf"))
        return (scores.topk(k, dim=1).indices == held_out[:, None]).any(1).float()

    def validation_step(self, batch, _):
        self.val_hit.update(self.hits(batch))
        self.log("val_hr20", self.val_hit, on_step=False, on_epoch=True)

    def test_step(self, batch, _):
        self.test_hit.update(self.hits(batch))
        self.log("test_hr20", self.test_hit, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=self.hparams.lr, total_steps=total)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}

    def on_validation_epoch_end(self):
        if self.trainer.sanity_checking:
            return
        value = self.val_hit.compute()  # collective inside, hence on every process
        self.print(f"epoch {self.current_epoch}: val hr@20 {value.item():.4f}")


def main():
    torch.set_num_threads(1)
    pl.seed_everything(3)
    best = ModelCheckpoint(dirpath="out/f08", filename="best", monitor="val_hr20", mode="max", enable_version_counter=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=4,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="out/f08",
    )
    data = Feedback()
    trainer.fit(BPR(), datamodule=data)
    result = trainer.test(ckpt_path="best", datamodule=data, verbose=False)
    if trainer.is_global_zero:
        print("test", result)


if __name__ == "__main__":
    main()
