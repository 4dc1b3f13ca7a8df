"""Autoencoder + linear probe with Accelerate."""
import logging
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__)


def linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)


class AutoEncoder(nn.Module):
    def __init__(self, code=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, code))
        self.decoder = nn.Sequential(nn.Linear(code, 96), nn.ReLU(), nn.Linear(96, 64))
        self.probe = nn.Linear(code, 10)

    def forward(self, x):
        z = self.encoder(x)
        return self.decoder(z), self.probe(z.detach())


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(3)
    num_epochs, batch_size, lr = 5, 32, 1e-2

    X, y = load_digits(return_X_y=True)
    X, y = torch.tensor(X / 16.0).float(), torch.tensor(y).long()
    train_loader = DataLoader(TensorDataset(X[:1472], y[:1472]), batch_size=batch_size, shuffle=True)
    val_loader = DataLoader(TensorDataset(X[1472:], y[1472:]), batch_size=64)

    model = AutoEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

    num_training_steps = num_epochs * len(train_loader)
    scheduler = linear_schedule_with_warmup(optimizer, num_training_steps // 10, num_training_steps)
    scheduler = accelerator.prepare(scheduler)
    logger.info("***** %d optimization steps *****", num_training_steps)

    for epoch in range(num_epochs):
        model.train()
        for x, label in train_loader:
            recon, probe = model(x)
            loss = F.mse_loss(recon, x) + F.cross_entropy(probe, label)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()

        model.eval()
        mses, hits = [], []
        with torch.no_grad():
            for x, label in val_loader:
                recon, probe = model(x)
                m, h = accelerator.gather_for_metrics(((recon - x).pow(2).mean(1), (probe.argmax(1) == label).float()))
                mses.append(m)
                hits.append(h)
        logger.info("epoch %d  recon mse %.5f  probe acc %.4f", epoch, torch.cat(mses).mean().item(), torch.cat(hits).mean().item())

    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
