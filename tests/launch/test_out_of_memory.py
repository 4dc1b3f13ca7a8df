"""Which failures say that memory ran out, and how much of it is there."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from instep.core.errors import PeerLost, RanksFailed
from instep.launch import resources
from instep.launch.failures import failure_of_exception, failure_of_exit, ran_out_of_memory

LOST = failure_of_exception(PeerLost("rank 1 is gone: out of memory?", [1]), 0, 2, "")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("no room"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_errors_of_memory(error: Exception) -> None:
    assert ran_out_of_memory(RanksFailed([failure_of_exception(error, 1, 1, ""), LOST]))


def test_a_killed_rank_is_taken_for_one() -> None:
    assert ran_out_of_memory(RanksFailed([failure_of_exit(1, -9, 1, "")]))


def test_other_failures() -> None:
    """A rank that lost another one does not know why, whatever its message says."""
    assert not ran_out_of_memory(RanksFailed([failure_of_exception(ValueError("MemoryError"), 0, 1, ""), LOST]))
    assert not ran_out_of_memory(RanksFailed([failure_of_exit(1, -11, 1, "")]))


def test_a_container_has_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    assert 0 < resources.available_memory_bytes() <= psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert resources.available_memory_bytes() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert resources.available_memory_bytes() > 3000
