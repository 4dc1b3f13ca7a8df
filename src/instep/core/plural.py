"""A number with its noun: `1 step`, `23 steps`."""


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return a number with a noun; `nouns` is its plural where that is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"
