"""Every rank fails on its own, after as many seconds as it is told: the first to fail is known beforehand."""

import os
import sys
import time

SECONDS = float(sys.argv[1 + int(os.environ["RANK"])])
begun = time.monotonic()
print("rank", os.environ["RANK"], "begins", flush=True)
# All begin at one time, whenever their processes were ready: at the next full ten seconds but one of the real clock.
time.sleep(max(0.0, float(sys.argv[3]) - time.time()) + SECONDS)
raise ValueError(f"after {SECONDS:g} s")
