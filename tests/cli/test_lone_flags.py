"""A flag that may stand without a value does not take its neighbour for one."""

from __future__ import annotations

import pytest

from instep.cli.lone_flags import complete_flags
from instep.core.profile_window import STEPS_PATTERN

LONE = {"--profile": ("auto", STEPS_PATTERN)}
WITH_VALUE = {"-n", "--epochs", "--nproc-per-node"}


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["t.py", "--profile"], ["t.py", "--profile=auto"]),
        (["t.py", "--profile", "20:25"], ["t.py", "--profile=20:25"]),
        (["t.py", "--profile", "lr=3"], ["t.py", "--profile=auto", "lr=3"]),
        (["--profile", "t.py"], ["--profile=auto", "t.py"]),
        (["--profile=7", "t.py"], ["--profile=7", "t.py"]),
        (["t.py", "--profile", "--epochs", "5"], ["t.py", "--profile=auto", "--epochs", "5"]),
        (["t.py", "--epochs", "--profile"], ["t.py", "--epochs", "--profile"]),
        (["t.py", "--", "--profile"], ["t.py", "--", "--profile"]),
        ([], []),
    ],
)
def test_a_training(words: list[str], completed: list[str]) -> None:
    assert complete_flags(words, LONE, WITH_VALUE, ends_at_argument=False) == completed


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["-n", "2", "--profile", "s.py", "--profile"], ["-n", "2", "--profile=auto", "s.py", "--profile"]),
        (["--nproc_per_node", "2", "s.py", "--profile", "x"], ["--nproc_per_node", "2", "s.py", "--profile", "x"]),
        (["--profile", "5", "s.py"], ["--profile=5", "s.py"]),
    ],
)
def test_what_follows_a_script_is_its_own(words: list[str], completed: list[str]) -> None:
    assert complete_flags(words, LONE, WITH_VALUE, ends_at_argument=True) == completed
