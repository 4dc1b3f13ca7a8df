"""Number objects in the order in which they are first seen, also when another one has been at their address before."""

from __future__ import annotations

import weakref
from typing import Any


class ObjectNumbers:
    """Numbers objects from 0 on, without keeping them alive."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = 0

    def __contains__(self, thing: Any) -> bool:
        return thing in self._numbers

    def of(self, thing: Any) -> int:
        """Return the number of an object, a new one if it has none."""
        if (number := self._numbers.get(thing)) is None:
            number = self._numbers[thing] = self._next
            self._next += 1
        return number
