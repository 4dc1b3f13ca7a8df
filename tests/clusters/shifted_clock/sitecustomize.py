"""Shifts the clock of every Python process that has this folder on PYTHONPATH, by CLOCK_SHIFT_S seconds.

Python imports it before anything else, so elastic and instep alike, forkservers and ranks included, see a machine whose
clock is off. Monotonic clocks stay as they are.
"""

import os
import time

_shift_s = float(os.environ.get("CLOCK_SHIFT_S", "0"))
_time, _time_ns = time.time, time.time_ns
if _shift_s:
    time.time = lambda: _time() + _shift_s
    time.time_ns = lambda: _time_ns() + round(_shift_s * 1e9)
