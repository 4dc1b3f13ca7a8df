"""Who reads the batches: decided from what reading and training take, changed at any moment, the same batches."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data import BatchDataset
from instep.data.input_pace import Change, InputPace, Limits, Window
from instep.data.readers import Request, find_reader
from instep.data.source import ReaderLimits, Source
from loading import N, Squares, load, make

# --- the decision ------------------------------------------------------------------------------------------


class ReadingCost:
    """What a batch takes to read (`read_s`) and a step to compute (`step_s`); readers may slow steps down."""

    def __init__(self, read_s: float, step_s: float, busy: float = 1.0, handing_over_s: float = 0.0001) -> None:
        self.read_s, self.step_s, self.busy, self.handing_over_s = read_s, step_s, busy, handing_over_s

    def window(self, readers: int) -> Window:
        if not readers:
            return Window(self.read_s, self.read_s * self.busy, self.read_s, self.step_s)
        wait_s = max(self.handing_over_s, self.read_s / readers - self.step_s)
        return Window(self.read_s, self.read_s * self.busy, wait_s, self.step_s)


def limits(spare_cores: float, most: int | None = None) -> Limits:
    return Limits(16, spare_cores, most)


def readers_chosen(cost: ReadingCost, room: Limits, pace: InputPace | None = None) -> int:
    """Return the number of readers when it does not change any more."""
    pace = InputPace() if pace is None else pace
    for _ in range(20):
        changes = [pace.decide(cost.window(pace.readers), room) for _ in range(2)]
        if changes == [None, None]:
            return pace.readers
    raise AssertionError("it goes on changing")


@pytest.mark.parametrize(
    ("cost", "spare_cores", "readers"),
    [
        pytest.param(ReadingCost(0.0001, 0.001), 7, 0, id="MNIST: a tenth of a millisecond is not worth it"),
        pytest.param(ReadingCost(0.001, 0.040), 7, 0, id="a fortieth of a step"),
        pytest.param(ReadingCost(0.008, 0.040), 7, 1, id="a fifth of a step: one is enough"),
        pytest.param(ReadingCost(0.160, 0.040), 15, 5, id="as many as keep up, and a few more"),
        pytest.param(ReadingCost(0.512, 0.040), 15, 15, id="as many as there are cores"),
        pytest.param(ReadingCost(0.512, 0.040), 0, 0, id="all cores compute"),
        pytest.param(ReadingCost(0.512, 0.040, busy=0.02), 0, 12, id="all cores compute, but reading waits for a disk"),
        pytest.param(ReadingCost(5.12, 0.040, busy=0.01), 15, 32, id="not any number"),
        pytest.param(ReadingCost(0.008, 0.040, handing_over_s=0.009), 7, 0, id="handing over takes as long: undone"),
    ],
)
def test_the_number_of_readers(cost: ReadingCost, spare_cores: float, readers: int) -> None:
    assert readers_chosen(cost, limits(spare_cores)) == readers


def test_another_program_is_not_taken_for_the_readers() -> None:
    """MNIST on a shared cost: reading takes a tenth of a millisecond, steps for a while three times as long."""
    pace, room = InputPace(2), limits(1)
    quiet, busy = (ReadingCost(0.00014, step_s, handing_over_s=0.00014) for step_s in (0.003, 0.011))
    change = pace.decide(quiet.window(2), room)
    assert change is not None
    assert change.readers == 0
    assert pace.decide(busy.window(0), room) is None
    assert pace.decide(quiet.window(0), room) is None
    assert pace.readers == 0
    slow = InputPace(2)
    slow.decide(quiet.window(2), room)
    changes = [slow.decide(busy.window(0), room) for _ in range(4)]
    assert [change is None for change in changes] == [True, True, True, False]  # it stays slow: it was the change


def test_not_more_than_fit() -> None:
    assert readers_chosen(ReadingCost(0.512, 0.040), limits(15, most=3)) == 3
    assert readers_chosen(ReadingCost(0.512, 0.040), limits(15, most=0)) == 0


def test_what_did_not_help_is_tried_again_when_reading_has_changed() -> None:
    pace, room = InputPace(), limits(7)
    crowded = ReadingCost(0.008, 0.040, handing_over_s=0.009)
    assert readers_chosen(crowded, room, pace) == 0
    assert [pace.decide(crowded.window(0), room) for _ in range(5)] == [None] * 5
    slower = ReadingCost(0.080, 0.040)
    assert pace.decide(slower.window(0), room) == Change(
        3, "a batch takes 80 ms to read and a step 40 ms, and the training waited 80 ms for it"
    )
    assert readers_chosen(slower, room, pace) == 3


def test_idle_readers_are_given_up() -> None:
    pace, room = InputPace(), limits(15)
    assert readers_chosen(ReadingCost(0.300, 0.040), room, pace) == 10
    assert readers_chosen(ReadingCost(0.080, 0.040), room, pace) == 10  # 3 would do: not enough to change
    assert readers_chosen(ReadingCost(0.040, 0.040), room, pace) == 4  # twice as many as just keep up
    assert readers_chosen(ReadingCost(0.0005, 0.040), room, pace) == 0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1), st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=30),
    st.floats(-4, 64),
    st.integers(0, 40),
)
def test_any_measurements(windows: list[tuple[float, float, float, float]], spare: float, most: int) -> None:
    pace, readers_seen = InputPace(), {0}
    for read_s, busy, wait_s, step_s in windows:
        before = pace.readers
        change = pace.decide(Window(read_s, read_s * busy, wait_s, step_s), Limits(16, spare, most))
        assert (change is None) == (pace.readers == before)
        assert 0 <= pace.readers <= max(readers_seen | {min(most, 32)})
        readers_seen.add(pace.readers)


# --- the same batches --------------------------------------------------------------------------------------


class Noisy(Squares):
    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), random.random()


class Sums(Squares):
    """Rounds by the number of threads."""

    def __getitem__(self, index: int) -> Any:
        return (torch.arange(200_000) * (index + 0.1)).sum(), torch.get_num_threads()


def requests() -> list[Request]:
    return [Request(epoch, torch.arange(first, min(first + 3, N))) for epoch in (0, 1) for first in range(0, N, 3)]


@pytest.mark.parametrize(("dataset", "most"), [(Noisy(), 2), ((torch.arange(N), torch.arange(N) * 2.5), 4)])
@given(changes=st.dictionaries(st.integers(0, 15), st.integers(0, 4), max_size=3))
@settings(max_examples=12, deadline=None)
def test_a_change_at_any_moment(dataset: Any, most: int, changes: dict[int, int]) -> None:
    expected = [*Source(find_reader(dataset, None, 7), ReaderLimits(fixed=0)).read(requests())]
    source = Source(find_reader(dataset, None, 7), ReaderLimits(cores=8))
    batches = []

    def decide(_window: Window, _batch: Any) -> bool:
        before = source._pace.readers
        source._pace.readers = min(most, changes.pop(len(batches), before))
        return source._pace.readers != before

    source._decide = decide  # type: ignore[method-assign]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("instep.data.source._WINDOW_S", 0.0)
            patch.setattr("instep.data.source._WINDOW_BATCHES", 0)
            for batch in source.read(requests()):
                batches.append(batch)
    finally:
        source.close()
    torch.testing.assert_close(batches, expected, rtol=0, atol=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_computes_on_one_thread_whoever_reads(workers: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        batch = load(Sums(), 0, 1, workers=workers)[0].parts[0].batch
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert (batch[1] == 1).all()


# --- by itself ---------------------------------------------------------------------------------------------


class Slow(Squares):
    """Waits for a disk, and says who reads."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return index, os.getpid()


class SlowBatches(Slow):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("dataset", [Slow(), SlowBatches()], ids=lambda dataset: type(dataset).__name__)
def test_a_slow_dataset_is_read_ahead_by_itself(dataset: Any) -> None:
    loader = make(dataset, workers=None)
    pids = []
    for batch in loader.steps(0, 60):
        pids.append(set(batch.parts[0].batch[1].tolist()))
    readers = loader.source.changes[0].change.readers
    loader.source.close()
    assert pids[0] == {os.getpid()}
    assert os.getpid() not in pids[-1]
    assert readers > 1


class SlowToOpen(Slow):
    """Takes a while before its first sample, in each process."""

    opened_by = -1

    def __getitem__(self, index: int) -> Any:
        if self.opened_by != os.getpid():
            self.opened_by = os.getpid()
            time.sleep(0.3)
        return super().__getitem__(index)


def test_readers_of_slow_batches_are_judged_once_they_have_started() -> None:
    dataset, slow_batch = SlowToOpen(), Request(0, torch.arange(30))  # 0.6 s
    _ = dataset[0]
    source = Source(find_reader(dataset, None, 7), ReaderLimits(cores=8))
    for number, batch in enumerate(source.read([slow_batch] * 45)):
        assert os.getpid() in batch[1] or number > 0
        time.sleep(0.05)
    readers = [change.change.readers for change in source.changes]
    source.close()
    assert readers[0] >= 10
    assert os.getpid() not in batch[1]
    assert min(readers) >= 10, "their start was taken for what they take"


class Watched(BatchDataset):
    """Says which thread reads."""

    is_thread_safe = True

    def __len__(self) -> int:
        return N

    def gather(self, indices: torch.Tensor) -> Any:
        return torch.full_like(indices, threading.current_thread() is threading.main_thread())


def test_threads_read_what_they_may() -> None:
    in_main = [bool(batch.parts[0].batch.all()) for batch in load(Watched(), workers=2)]
    assert in_main == [True, False, False, False, False, False]


# --- forks that nobody asked for ---------------------------------------------------------------------------


class ThroughAnOffset(Slow):
    """Reads a file through its offset, which forks would share."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(range(N)))
        self._file = path.open("rb", buffering=0)
        self.close = self._file.close

    def __getitem__(self, index: int) -> Any:
        self._file.seek(index)
        time.sleep(0.02)
        return self._file.read(1)[0], os.getpid()


class FailsElsewhere(Slow):
    """As a connection, a GPU or a thread does that a fork does not have."""

    def __init__(self, fails: str) -> None:
        self._pid, self._fails = os.getpid(), fails

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self._pid:
            if self._fails == "raises":
                raise RuntimeError("not in a fork")
            if self._fails == "dies":
                os._exit(3)
            time.sleep(60)
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["offset", "raises", "dies", "hangs"])
def test_what_does_not_survive_a_fork_is_read_here(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.data.source._TIMEOUT_S", 1.5)
    monkeypatch.setattr("instep.data.source._TIMEOUT_READS", 1)
    dataset = ThroughAnOffset(tmp_path / "bytes") if kind == "offset" else FailsElsewhere(kind)
    loader = make(dataset, workers=None)
    for batch in loader.steps(0, 25):
        samples, pids = batch.parts[0].batch
        assert samples.tolist() == loader.sample_indices(batch.step).tolist()
        assert set(pids.tolist()) == {os.getpid()}
    loader.source.close()
    if isinstance(dataset, ThroughAnOffset):
        dataset.close()
    chosen = [(change.readers > 0, change.reason) for change, _, _ in loader.source.changes]
    assert [is_ahead for is_ahead, _ in chosen] == [True, False]
    assert {"offset": "keeps a file open", "raises": "not in a fork", "dies": "exited", "hangs": "timed out"}[
        kind
    ] in chosen[1][1]


def test_an_error_of_the_datasets_own_is_raised_here() -> None:
    class Broken(Slow):
        def __getitem__(self, index: int) -> Any:
            if index == 17 and time.monotonic() > begun + 1.5:
                raise KeyError("of its own")
            return super().__getitem__(index)

    begun = time.monotonic()
    loader = make(Broken(), workers=None)
    with pytest.raises(KeyError, match="of its own") as caught:
        for _ in loader.steps(0, 200):
            pass
    loader.source.close()
    assert [note.partition(" of the")[0] for note in caught.value.__notes__] == [
        "This happened while reading sample 17"
    ]
