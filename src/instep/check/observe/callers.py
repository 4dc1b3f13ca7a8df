"""Who called a hooked function: the user's own code, or which installed package.

Ranks: all.
"""

from __future__ import annotations

import sys
from types import FrameType

from instep.check.observe.log import ObservationLog

_TRAINERS = {"transformers.trainer": "transformers", "lightning.pytorch.trainer.trainer": "lightning"} | {
    "pytorch_lightning.trainer.trainer": "lightning"
}


def calling_package(log: ObservationLog, frame: FrameType | None, passed: tuple[str, ...] = ("torch",)) -> str:
    """Return the installed package that called, seen through those in `passed`; empty: the user's own code."""
    while frame is not None:
        if log.is_users(frame):
            return ""
        name = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        if not name.startswith("instep.check") and package not in passed and package not in sys.stdlib_module_names:
            return str(package)
        frame = frame.f_back
    return ""


def trainer_around(frame: FrameType | None) -> str:
    """Return the framework whose trainer runs the loop; empty: none."""
    while frame is not None:
        if (framework := _TRAINERS.get(frame.f_globals.get("__name__", ""))) is not None:
            return framework
        frame = frame.f_back
    return ""
