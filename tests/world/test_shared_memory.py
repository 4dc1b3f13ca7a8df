"""Folders in shared memory: they end with the last process that uses them, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from instep.launch.scratch import open_scratch
from instep.world import shared_memory
from instep.world.shared_memory import SharedFolder, remove_unused_folders

fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", folder)
    return folder


def fill(folder: SharedFolder) -> SharedFolder:
    (folder.path / "blocks").mkdir(exist_ok=True)
    (folder.path / "blocks" / "one").write_text("content")
    return folder


def test_the_last_user_removes_it(memory: Path) -> None:
    first, second, other = fill(SharedFolder("a")), fill(SharedFolder("a")), fill(SharedFolder("b"))
    assert first.path == second.path != other.path
    first.close()
    assert (second.path / "blocks" / "one").exists()
    second.close()
    second.close()
    assert list(memory.iterdir()) == [other.path]
    del other
    assert not list(memory.iterdir())


def _use_and_die() -> None:
    _folder = fill(SharedFolder("a"))
    os.kill(os.getpid(), signal.SIGKILL)


def _leave_one_behind() -> None:
    process = fork.Process(target=_use_and_die)
    process.start()
    process.join()


def test_what_killed_processes_leave_is_removed(memory: Path) -> None:
    """By the next process that opens a folder, and by the launcher, before its ranks start and when they have ended."""
    _leave_one_behind()
    (left,) = memory.iterdir()
    assert left.exists()
    SharedFolder("b")
    assert not left.exists()
    _leave_one_behind()
    with open_scratch():
        assert not left.exists()
        _leave_one_behind()
        assert left.exists()
    assert not left.exists()


def test_a_fork_is_a_user(memory: Path) -> None:
    """A data worker that outlives its rank keeps the folder; one that ends first leaves it to its rank."""
    folder, leave = fill(SharedFolder("a")), fork.Event()
    worker = fork.Process(target=leave.wait, args=(60,))
    worker.start()
    path = folder.path
    folder.close()
    assert path.exists()
    leave.set()
    worker.join()
    remove_unused_folders()
    assert not path.exists()


def _come_and_go(num_times: int) -> None:
    for _ in range(num_times):
        folder = SharedFolder("a")
        own = folder.path / str(os.getpid())
        own.mkdir()
        time.sleep(0.0002)
        own.rmdir()
        folder.close()


def test_users_come_and_go_at_the_same_time(memory: Path) -> None:
    """Nobody's folder is removed while they use it."""
    processes = [fork.Process(target=_come_and_go, args=(200,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert not list(memory.iterdir())


def test_a_link_of_another_user_is_not_followed(memory: Path, tmp_path: Path) -> None:
    valuable = tmp_path / "valuable"
    (valuable / "folder").mkdir(parents=True)
    link = memory / f"instep-shared-{os.geteuid()}-a"
    link.symlink_to(valuable)
    remove_unused_folders()
    with pytest.raises(PermissionError):
        SharedFolder("a")
    assert (valuable / "folder").exists()
    assert len(list(valuable.iterdir())) == 1
