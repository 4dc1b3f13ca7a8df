"""A Task that learns from Parquet files, tar shards or token files, here or in an object store."""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import instep


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    return {"vector": torch.from_numpy(sample["npy"]), "target": torch.tensor(sample["json"])}


@dataclass(kw_only=True)
class FromFiles(instep.Task):
    """Predicts the sum of a row's vector."""

    kind: str = "parquet"
    url: str = ""
    endpoint: str = ""
    cache: str = ""
    pause_s: float = 0.0

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        )

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=1e-3)

    def train_data(self) -> Any:
        options = {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": self.endpoint}}
        more: dict[str, Any] = {"cache": self.cache, "storage_options": options if self.endpoint else None}
        if self.kind == "tar":
            return instep.data.tar(self.url, **more).map(decode)
        if self.kind == "tokens":
            return instep.data.tokens(self.url, 64, "uint8", **more)
        return instep.data.parquet(self.url, **more)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(self.pause_s)
        if self.kind == "tokens":
            x, y = batch
            return F.mse_loss(model(x / 255)[:, 0], y.float().mean(1))
        return F.mse_loss(model(batch["vector"])[:, 0], batch["target"])


if __name__ == "__main__":
    instep.main(FromFiles)
