"""Read the history of a run that wandb has logged offline: a log of protocol buffers in LevelDB's format.

Seven bytes of header; then blocks of 32 KiB with records of a checksum (4 bytes), a length (2), a type (1) and data. A
record that does not fit into a block is continued in the next one; less than seven bytes at the end of one are padding.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the logged rows of a .wandb file, as far as it was written; each has `_step`."""
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
            }
            values.setdefault("_step", record.history.step.num)
            yield values


def _records(data: bytes) -> Iterator[bytes]:
    place, parts = _FILE_HEADER, b""
    while place + _HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        content = data[place + _HEADER : place + _HEADER + length]
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(content) < length:
            return  # not written yet
        parts = content if kind in (_FULL, _FIRST) else parts + content
        if kind in (_FULL, _LAST):
            yield parts
        place += _HEADER + length
