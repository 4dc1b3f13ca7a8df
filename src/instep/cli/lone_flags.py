"""Options that may stand without a value: `--profile`, or `--profile 20:25`.

The parser knows options with a value and options without one. A flag of these that has no value gets one here, before
the command line is parsed: `--profile script.py` becomes `--profile=auto script.py`.
"""

import re
from collections.abc import Collection, Mapping, Sequence


def complete_flags(
    words: Sequence[str],
    lone: Mapping[str, tuple[str, str]],
    with_value: Collection[str],
    ends_at_argument: bool,
) -> list[str]:
    """Return the words of a command line, with a value for each flag of `lone` that has none.

    `lone` has, for each such flag, the value that it means alone and the pattern of values. `with_value` are the flags
    that always have one. `ends_at_argument`: all words from the first argument on belong to somebody else.
    """
    completed: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--" or (ends_at_argument and not _is_flag(word)):
            return [*completed, word, *rest]
        flag = _with_dashes(word)
        if flag in lone:
            value, pattern = lone[flag]
            takes_next = bool(rest) and re.fullmatch(pattern, rest[0]) is not None
            completed.append(f"{flag}={rest.pop(0) if takes_next else value}")
        else:
            completed.append(word)
            if flag in with_value and rest:
                completed.append(rest.pop(0))
    return completed


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-")


def _with_dashes(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") else word
