"""Draws by row: the numbers of one's own noise, from hashes ([Note: Noise of one's own] in row_noise.py)."""

import math
import sys
import threading
from collections.abc import Sequence

import torch

from instep.core.frames import is_users
from instep.core.splitmix import mix64
from instep.parallel.batch_context import BatchContext, is_in_backward
from instep.parallel.dropout import ODD, Key, find_rows, keep_mask, key_of, key_table, rows_back, scramble

_SALT = 0x524F574E4F495345
_KEYS_EACH, _KEPT = 4, 16
"""Keys of a draw; draws of a region whose keys compiled code reads from a tensor."""
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
"""How many random bits a number in [0, 1) has; float64 has 52, from two hashes."""


class RowNoise:
    """Draws noise for the part of the global batch under way; each draw of a part differs."""

    def __init__(self, context: BatchContext, compiles: bool) -> None:
        self.uses = 0
        self._uses_before = 0
        """Draws of the part before the region under way."""
        self._tables: dict[int, torch.Tensor] = {}
        """The keys of a region's first draws, by the number of draws before it."""
        self._keys: torch.Tensor | None = None
        self.context = context
        self._thread = threading.get_ident()
        context.noisy.append(self)
        context.draws = self
        if compiles:  # traced code could not do it at the first draw
            context.read_noise()

    def is_active(self) -> bool:
        """Return whether a part of a training step is under way here."""
        if not self.context.num_rows:
            return False
        if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None:
            return False  # under vmap a tensor's shape lacks the mapped dimension
        return torch.compiler.is_compiling() or threading.get_ident() == self._thread or is_in_backward()

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, is_open: bool = False) -> torch.Tensor:
        """Return numbers in [0, 1), evenly spaced as torch's are; `is_open`: in (0, 1)."""
        half = 0.5 if is_open else 0.0
        if dtype == torch.float64:
            high, low = self._words(shape, 2)
            return (_bits(high, 26).double() * 2**26 + _bits(low, 26).double() + half) * 2.0**-52
        digits = DIGITS[dtype] - is_open
        (words,) = self._words(shape, 1)
        return ((_bits(words, digits).float() + half) * 2.0**-digits).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return numbers of a normal distribution, by the inverse of its distribution function."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (torch.erfinv(self.uniform(shape, wide, is_open=True) * 2 - 1) * math.sqrt(2)).to(dtype)

    def keep(self, shape: torch.Size, levels: int) -> torch.Tensor:
        """Return which elements a dropout keeps."""
        return keep_mask(self.context, self._key(self._next_use(), 0), shape, levels, None, _line())

    def begin_region(self) -> None:
        """Count draws from 0 on, for compiled code that serves several regions ([Note: Regional compilation])."""
        before = self._uses_before = self.uses
        self.uses = 0
        if before not in self._tables:
            salts = [self._salt(before + 1 + use, part) for use in range(_KEPT) for part in range(_KEYS_EACH)]
            self._tables[before] = key_table(salts, self.context.noise.device)
        self._keys = self._tables[before]

    def end_region(self) -> None:
        """Count all draws of the part again."""
        self.uses += self._uses_before
        self._uses_before = 0

    @staticmethod
    def _salt(use: int, part: int) -> int:
        return mix64(_SALT + _KEYS_EACH * use + part)

    def _key(self, use: int, part: int) -> Key:
        """Return a key of a draw: 0 for a dropout, 1 and more for the words of a number."""
        if self._keys is not None and use <= _KEPT and torch.compiler.is_compiling():
            return self._keys[(use - 1) * _KEYS_EACH + part]
        return key_of(self._salt(self._uses_before + use, part))

    def _next_use(self) -> int:
        self.context.read_noise()
        return self.context.next_use(self)

    def _words(self, shape: Sequence[int], count: int) -> list[torch.Tensor]:
        """Return hashes of 32 bits for each element, `count` of them."""
        noise, use = self.context.noise, self._next_use()
        row_dim, rows_each = find_rows(shape, self.context, _line())
        num_rows = shape[row_dim] if shape else 1
        number = torch.arange(num_rows, device=noise.device, dtype=torch.int32)
        element = torch.arange(math.prod(shape) // max(num_rows, 1), device=noise.device, dtype=torch.int32)
        words = []
        for part in range(count):
            key = self._key(use, 1 + part)
            rows = scramble((number + noise[2] * rows_each) * ODD + (noise[0] ^ key[0]))
            columns = scramble(element * ODD + (noise[1] ^ key[1]))
            words.append(rows_back(scramble(rows[:, None] + columns[None, :]), shape, row_dim))
        return words


def _bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """Return the highest bits of hashes, as numbers that are not negative."""
    return (words >> (32 - count)) & ((1 << count) - 1)


def _line() -> str:
    """Return the user's line that draws; it names a guess."""
    if torch.compiler.is_compiling():
        return "noise"
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"noise at {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
