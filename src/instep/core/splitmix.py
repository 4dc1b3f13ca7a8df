"""splitmix64's mixing function, for noise keys and fingerprints."""

from typing import Any

_MASK = 0xFFFFFFFFFFFFFFFF


def finalize64(word: Any) -> Any:
    """Scramble 64 bits, of an int or of each element of a NumPy array of uint64 (the finalizer of splitmix64)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def mix64(value: int) -> int:
    """Return the 64 bits that splitmix64 makes of a state."""
    # As finalize64, without a call: every step mixes four times.
    word = (value + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
