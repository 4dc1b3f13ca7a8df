"""Run the command line inside this process, where nothing has to be launched: it ends by an exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from instep.cli import app as cli


class Ended(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


@pytest.fixture
def command(monkeypatch: Any, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """Give a function that runs `instep WORDS` and returns exit code, standard output and standard error."""

    def leave(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(cli, "leave", leave)

    def run(*words: str) -> tuple[int, str, str]:
        code = 0
        try:
            cli.app(args=list(words))
        except Ended as end:
            code = end.code
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return run
