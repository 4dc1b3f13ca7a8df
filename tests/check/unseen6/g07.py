"""Cross-lingual sentence matching: two bag-of-subword encoders, triplet margin loss, Lightning."""
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

OUT = "out/g07"
VOCAB, LENGTH = 500, 12


class ParallelSentences(Dataset):
    def __init__(self, n, seed):
        mapping = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
        g = torch.Generator().manual_seed(seed)
        topic = torch.randint(0, 10, (n, 1), generator=g)
        self.src = (topic * 50 + torch.randint(0, 50, (n, LENGTH), generator=g)) % VOCAB
        tgt = mapping[self.src]
        noise = torch.rand(n, LENGTH, generator=g) < 0.5
        self.tgt = torch.where(noise, torch.randint(0, VOCAB, (n, LENGTH), generator=g), tgt)
        self.negative = torch.randint(1, n, (n,), generator=g)

    def __len__(self):
        return len(self.src)

    def __getitem__(self, i):
        j = (i + int(self.negative[i])) % len(self)
        return self.src[i], self.tgt[i], self.tgt[j]


class Matcher(L.LightningModule):
    def __init__(self, dim=48, lr=5e-3, margin=0.4):
        super().__init__()
        self.save_hyperparameters()
        self.src_emb = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.tgt_emb = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.src_head, self.tgt_head = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.bank = []

    def encode(self, src, tgt):
        a = F.normalize(self.src_head(self.src_emb(src)), dim=-1)
        b = F.normalize(self.tgt_head(self.tgt_emb(tgt)), dim=-1)
        return a, b

    def training_step(self, batch, _):
        src, tgt, other = batch
        a, both = self.encode(src, torch.cat([tgt, other]))
        pos, neg = both.chunk(2)
        gap = (a * neg).sum(-1) - (a * pos).sum(-1) + self.hparams.margin
        loss = gap.clamp(min=0).mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_validation_epoch_start(self):
        self.bank.clear()

    def validation_step(self, batch, _):
        src, tgt, _ = batch
        self.bank.append(self.encode(src, tgt))

    def on_validation_epoch_end(self):
        queries = torch.cat([a for a, _ in self.bank])
        gallery = torch.cat([b for _, b in self.bank])
        similarity = queries @ gallery.t()
        rank_of_truth = (similarity > similarity.diagonal()[:, None]).sum(1)
        self.log("val_r1", (rank_of_truth < 1).float().mean(), sync_dist=True, prog_bar=True)
        self.log("val_r10", (rank_of_truth < 10).float().mean(), sync_dist=True, prog_bar=True)
        self.log("val_mrr", (1.0 / (rank_of_truth + 1)).mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    L.seed_everything(5, workers=True)
    train = DataLoader(ParallelSentences(1536, seed=1), batch_size=32, shuffle=True, drop_last=True)
    val = DataLoader(ParallelSentences(400, seed=2), batch_size=50)
    best = ModelCheckpoint(dirpath=os.path.join(OUT, "ckpt"), monitor="val_mrr", mode="max", save_top_k=1)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        max_epochs=4,
        logger=CSVLogger(OUT, name="logs"),
        callbacks=[best],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=12,
    )
    trainer.fit(Matcher(), train, val)
    if trainer.is_global_zero:
        shown = {k: round(float(v), 4) for k, v in trainer.callback_metrics.items()}
        print(f"retrieval among {len(val.dataset)} sentences: {shown}; best MRR {float(best.best_model_score):.4f}")


if __name__ == "__main__":
    main()
