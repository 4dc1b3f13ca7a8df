"""Detect random operations whose noise depends on the number of processes.

Noise that an operator draws inside (fused attention, LSTM, multinomial) comes from torch's generator, in an order that
depends on the split. It is seeded by the step and the first row, so that a run is repeatable. But another number
of processes gives other noise, which the user is told once. Other noise is drawn by row ([Note: Noise of one's own]).
"""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from instep.parallel.batch_context import BatchContext

_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


class NoiseWatch(TorchDispatchMode):
    """Records the user's line of every random operation. For one step only: it slows each operation down."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, str] = {}
        """Operation by the line that called it."""
        self._others: list[Any] = []
        self._drawn_from: list[str] = []
        """The generators besides torch's that were drawn from."""

    def __enter__(self) -> Any:
        self._others = _other_generators()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        pairs = zip(_OTHERS, self._others, _other_generators(), strict=True)
        self._drawn_from = [name for name, before, after in pairs if before != after]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_ours() and _draws(func, args, kwargs):
            self.lines.setdefault(calling_line(), func.overloadpacket.__name__)
        return func(*args, **kwargs)

    def notices(self) -> list[str]:
        """Return a message for each line."""
        return [
            f"{line} draws random numbers ({name}) that instep does not control: they differ with the number of "
            "processes. Those of torch's rand, randn, randint, bernoulli, normal, dropout and their kin do not."
            for line, name in self.lines.items()
        ] + [
            f"the model or the loss draws from {name}, which instep does not control: the numbers differ with the "
            "number of processes. Use torch's rand, randn, randint, bernoulli, normal, or train with --exact."
            for name in self._drawn_from
        ]


_OTHERS = ("Python's random", "numpy.random")


def _other_generators() -> list[Any]:
    _, keys, *rest = np.random.get_state(legacy=True)
    return [random.getstate(), (np.asarray(keys).tobytes(), *rest)]


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the call draws: torch tags attention as random even without dropout."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout"):
            value = kwargs.get(argument.name, args[position] if position < len(args) else argument.default_value)
            return bool(value)
    return True


def _is_ours() -> bool:
    """Return whether it is the number that stands for a use of noise ([Note: Recomputed noise])."""
    frame = sys._getframe(2)
    # Another dispatch mode may be between the two.
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_FOREIGN[0]) or frame.f_code.co_name == "__torch_dispatch__"
    ):
        frame = frame.f_back
    return frame.f_code is BatchContext.next_use.__code__


def calling_line() -> str:
    """Return the user's line, from within a dispatch mode."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_FOREIGN, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
