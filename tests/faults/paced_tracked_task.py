"""A Task whose steps take a little time, so that a kill comes between them."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import instep
from tasks import Small


@dataclass(kw_only=True)
class Paced(Small):
    num_samples: int = 240

    def on_step(self, record: Any) -> None:
        time.sleep(0.01)


if __name__ == "__main__":
    instep.main(Paced)
