"""Run the command line inside this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from instep.cli.app import app


@pytest.fixture
def command(capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs `instep WORDS` and returns exit code, standard output and standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            app(args=list(words))
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run
