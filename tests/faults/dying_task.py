"""A Task whose process is killed at certain steps, once at each of them, between two checkpoints."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import instep
from tasks import Small


@dataclass(kw_only=True)
class Dying(Small):
    """Killed `num_kills` times: every ten steps, three steps after a checkpoint of --save-every 5."""

    num_samples: int = 240
    num_kills: int = 10
    marks: str = ""

    def on_step(self, record: Any) -> None:
        number, place = divmod(record.step, 10)
        mark = Path(self.marks) / f"killed-{number}"
        if place == 8 and number < self.num_kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(self, model: Any, batch: Any) -> Any:
        loss = super().loss(model, batch)
        return {"loss": loss, "double": 2 * loss}


if __name__ == "__main__":
    instep.main(Dying)
