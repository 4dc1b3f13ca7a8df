"""Runs on a host, before anything starts: say what is there, and whether the hosts see the same disk.

The side that asks writes a line of JSON (`file`, `folder`, `token`, `number`) and gets one back; at its second line
this host says which of the hosts' marks it sees in the folder; at the end of input its own mark is removed.

Room: reads, writes one empty file for a moment. No torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import socket
import sys
from pathlib import Path
from typing import Any

from instep.core.version import __version__
from instep.launch.hosts.plan import Survey


def survey(file: str) -> Survey:
    """Look at this machine."""
    with socket.create_server(("", 0)) as free:
        port = int(free.getsockname()[1])
    path = Path(file)
    return Survey(
        instep=__version__,
        code=_hash_of_code(Path(__file__).parents[2]),
        python=platform.python_version(),
        torch=_version("torch"),
        numpy=_version("numpy"),
        file=hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        port=port,
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _hash_of_code(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def _answer(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer the side that asks."""
    asked = json.loads(sys.stdin.readline())
    _answer(dataclasses.asdict(survey(asked["file"])))
    if not asked["folder"]:
        return
    folder = Path(asked["folder"])
    mark = folder / f".instep-{asked['token']}-{asked['number']}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
        _answer({})
        sys.stdin.readline()
        seen = [path.name.rpartition("-")[2] for path in folder.glob(f".instep-{asked['token']}-*")]
        _answer({"seen": sorted(map(int, seen))})
        sys.stdin.read()
    except OSError as error:
        _answer({"error": f"{folder} cannot be written: {error.strerror or error}"})
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
