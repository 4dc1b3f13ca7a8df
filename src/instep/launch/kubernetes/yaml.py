"""Write plain values as readable YAML: block style, with comments, long text as it is. Pure.

It is written by hand because YAML libraries drop comments. It covers what the manifests need: mappings, lists, strings,
numbers and booleans.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PLAIN = re.compile(r"(?:--)?[A-Za-z_/][\w./=-]*(?::[\w./-]+)*", re.ASCII)
"""Strings that need no quotes anywhere."""
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan"}
_ESCAPED = re.compile("[^\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""What is not printable in YAML, and its line breaks beside the newline."""


@dataclass(frozen=True)
class Commented:
    """A value with a comment above it."""

    comment: str
    value: Any


def to_yaml(documents: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Return the documents as one YAML stream, below a comment with the title."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in title.splitlines())
    return head + "---\n".join("\n".join(_mapping(document, 0)) + "\n" for document in documents)


def _mapping(value: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, item in value.items():
        yield from _comment(item, depth)
        yield from _entry(f"{_scalar(key)}:", _bare(item), depth)


def _entry(name: str, item: Any, depth: int) -> Iterator[str]:
    space = "  " * depth
    if isinstance(item, Mapping) and item:
        yield f"{space}{name}"
        yield from _mapping(item, depth + 1)
    elif _is_list(item) and item:
        if all(isinstance(element, int | float) for element in item):
            yield f"{space}{name} {json.dumps(list(item))}"
            return
        yield f"{space}{name}"
        yield from _list(item, depth)
    elif isinstance(item, str) and _is_literal(item):
        yield f"{space}{name} |{'2' if item[0] in ' ' else ''}{'' if item.endswith(chr(10)) else '-'}"
        yield from (f"{space}  {line}".rstrip("\r") if line else "" for line in item.removesuffix("\n").split("\n"))
    else:
        yield f"{space}{name} {_scalar(item)}"


def _list(value: Sequence[Any], depth: int) -> Iterator[str]:
    """Yield a list at the indentation of its name."""
    space = "  " * depth
    for item in value:
        yield from _comment(item, depth)
        item = _bare(item)
        if isinstance(item, Mapping) and item:
            lines = list(_mapping(item, depth + 1))
            start = next(number for number, line in enumerate(lines) if not line.lstrip().startswith("#"))
            yield from (line[2:] for line in lines[:start])  # a comment goes above the dash
            yield f"{space}- {lines[start].lstrip()}"
            yield from lines[start + 1 :]
        else:
            yield f"{space}- {_scalar(item)}"


def _bare(item: Any) -> Any:
    return item.value if isinstance(item, Commented) else item


def _comment(item: Any, depth: int) -> Iterator[str]:
    if isinstance(item, Commented):
        yield from (f"{'  ' * depth}# {line}" for line in item.comment.splitlines())


def _is_list(item: Any) -> bool:
    return isinstance(item, Sequence) and not isinstance(item, str)


def _is_literal(text: str) -> bool:
    """Return whether a text can be written as a literal block."""
    return (
        "\n" in text
        and text.strip() != ""
        and text[0] not in "\n\t"
        and not text.endswith("\n\n")
        and not _ESCAPED.search(text)
    )


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT else _quoted(value)
    return json.dumps(value)  # a number or a boolean, nothing, an empty mapping or list


def _quoted(text: str) -> str:
    """Quote a text as JSON, which is YAML too, with YAML's escapes for unprintable characters."""
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))
