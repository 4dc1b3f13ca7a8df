"""What to try, as a person writes it: `LOW..HIGH`, or `A,B,C`. Pure."""

from __future__ import annotations

import math

from instep.core.errors import SpecError


def read_range(text: str, low: float, high: float, what: str) -> tuple[float, float]:
    """Return the ends of `LOW..HIGH`; of an empty text, the given ones. Raise SpecError if it is no positive range."""
    if not text:
        return low, high
    first, dots, last = text.partition("..")
    try:
        low, high = float(first), float(last)
    except ValueError:
        low = high = math.nan
    if not dots or not math.isfinite(low) or not math.isfinite(high):
        raise SpecError(f"over={text!r} is not a range of {what}. Write LOW..HIGH, for instance --over 1..100.")
    if not 0 < low < high:
        raise SpecError(f"over={text!r} holds no {what}: the lower end comes first, and is more than 0.")
    return low, high


def read_list(text: str, least: int, what: str) -> tuple[int, ...]:
    """Return the whole numbers of `A,B,C` in ascending order; raise SpecError if they cannot be compared."""
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise SpecError(f"over={text!r} is not a list of numbers of {what}. Write for instance --over 1,2,4.") from None
    if numbers[0] < least:
        raise SpecError(f"over={text!r}: {numbers[0]} {what} is too few. Use at least {least}.")
    if len(numbers) < 2:
        raise SpecError(f"over={text!r} leaves nothing to compare. Give two or more numbers of {what}.")
    return tuple(numbers)


def doublings(least: int, most: int) -> tuple[int, ...]:
    """Return `least`, its doublings below `most`, and `most`; 0 is followed by 1."""
    numbers = [least]
    while (following := max(1, 2 * numbers[-1])) < most:
        numbers.append(following)
    return tuple(sorted({*numbers, max(least, most)}))
