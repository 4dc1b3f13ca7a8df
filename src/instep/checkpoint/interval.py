"""How often to save, when nobody says so. Pure.

A save costs training time; a failure costs the time since the last save, half an interval on average. The sum is least
where the interval is the square root of twice the product of the cost and the time between failures (Young 1974,
refined by Daly 2006).
"""

from __future__ import annotations

import math

FIRST_SAVE_S = 30.0
"""When to make the first save, from which the cost is known."""
_SHORTEST_S, _LONGEST_S = 5.0, 3600.0


def best_interval(stall_s: float, write_s: float, between_failures_s: float) -> float:
    """Give the seconds between two saves that block training for `stall_s` and take `write_s` in all."""
    wanted = math.sqrt(2 * stall_s * between_failures_s)
    return min(max(wanted, 2 * write_s, _SHORTEST_S), _LONGEST_S)  # the disk is not to be busy half of the time
