"""The file of predictions: checked before anything is computed, and there only when it is complete.

Ranks: one, the launching process or rank 0.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from instep.core.errors import SpecError
from instep.train.predictions.formats import PredictionFile, Progress, find_format
from instep.train.predictions.parts import Parts, write_explained


class PredictionOutput:
    """Where predictions go: a file, and beside it, while they are computed, a folder with the ranks' parts."""

    def __init__(self, path: Path, force: bool = False) -> None:
        self.path, self._force = path, force
        self.format: PredictionFile = find_format(path)
        self.format.check_available()
        folder = path.absolute().parent
        if not folder.is_dir():
            raise SpecError(f"out={path}: the folder {folder} does not exist. Create it, or give another one.")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise SpecError(f"out={path}: the folder {folder} cannot be written to. Give another one.")
        self._refuse_existing()
        self.parts = folder / f".{path.name}.{socket.gethostname()}-{os.getpid()}.parts"

    def _refuse_existing(self) -> None:
        if self.path.is_dir():
            raise SpecError(f"out={self.path} is a folder. Give the name of a file.")
        if self.path.exists() and not self._force:
            raise SpecError(f"out={self.path} exists already. Give another name, or --force to replace it.")

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Make the folder of parts, and delete it at the end, with what commands that were killed have left."""
        with write_explained(self.parts):
            self._clear_earlier()
            shutil.rmtree(self.parts, ignore_errors=True)
            self.parts.mkdir()
        try:
            yield
        finally:
            shutil.rmtree(self.parts, ignore_errors=True)

    def complete(self, parts: Parts, progress: Progress) -> None:
        """Write the file from its parts, and give it its name."""
        self.format.check(parts.columns)
        scratch = self.parts / self.path.name
        with write_explained(self.parts):
            self.format.write(scratch, parts, progress)
            with scratch.open("rb") as file:
                os.fsync(file.fileno())
            self._refuse_existing()  # it may have come meanwhile
            os.replace(scratch, self.path)

    def _clear_earlier(self) -> None:
        name = re.compile(rf"\.{re.escape(self.path.name)}\.{re.escape(socket.gethostname())}-(\d+)\.parts")
        for entry in self.parts.parent.iterdir():
            match = name.fullmatch(entry.name)
            if match is not None and not Path("/proc", match[1]).exists():
                shutil.rmtree(entry, ignore_errors=True)
