"""How long tests wait before they say that something hangs: a slow or busy machine must never be the reason.

Limits in the tests are what an idle machine needs, with room to spare; all of them are multiplied here.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

PATIENCE = float(os.environ.get("INSTEP_TEST_PATIENCE", "4"))


class Popen(subprocess.Popen[str]):
    """A process whose limits for `communicate` and `wait` are multiplied by PATIENCE."""

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return what the process printed."""
        return super().communicate(input, None if timeout is None else timeout * PATIENCE)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code."""
        return super().wait(None if timeout is None else timeout * PATIENCE)


def run(words: list[str], timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return what it printed."""
    return subprocess.run(words, timeout=timeout * PATIENCE, capture_output=True, text=True, **more)
