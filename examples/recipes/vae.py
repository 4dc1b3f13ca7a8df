"""A variational autoencoder of the digits. The noise of `torch.randn_like` is drawn by row of the whole batch.

python examples/recipes/vae.py
instep train examples/recipes/vae.py -n 2        two processes, the same result
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import instep


class Autoencoder(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(z), mean, log_variance


@dataclass(kw_only=True)
class Vae(instep.Task):
    """A variational autoencoder."""

    latent: int = 8

    def model(self):
        return Autoencoder(self.latent)

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=2e-3)

    def train_data(self):
        return instep.data.digits("train")

    def eval_data(self):
        return instep.data.digits("test")

    def loss(self, model, batch):
        x, _ = batch
        logits, mean, log_variance = model(x)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
        means = {"reconstruction": reconstruction.mean(), "divergence": divergence.mean()}  # logged beside the loss
        return {"loss": (reconstruction + divergence).mean(), **means}


if __name__ == "__main__":
    instep.main(Vae)
