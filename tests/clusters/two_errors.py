"""Every rank fails by itself, so many seconds after all of them are ready: who is first is known beforehand."""

import os
import sys
import time
from pathlib import Path

folder, seconds = Path(sys.argv[1]), sys.argv[2:]
rank = int(os.environ["RANK"])
(folder / f"ready-{rank}").touch()
while len(list(folder.glob("ready-*"))) < len(seconds):
    time.sleep(0.01)
time.sleep(float(seconds[rank]))
raise ValueError(f"rank {rank} after {seconds[rank]} s")
