"""The names that a mistyped one resembles."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence, after a space, with the known names that a name resembles; empty: none does."""
    names = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" Nearest: {', '.join(names)}." if names else ""
