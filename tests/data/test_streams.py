"""Streams: dealt out by position, found again after a stop, and what a stream must not do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from instep.core.errors import DataError, SpecError, TaskError
from instep.data import stream
from instep.data.batch_plan import BatchPlan
from instep.data.digest import digest_of
from instep.data.input_pace import Window
from instep.data.kinds import count_samples, first_rows, open_chunks
from instep.data.loader import LoadOptions
from instep.data.readers import Request
from instep.data.stream_reader import StreamReader
from loading import assert_same
from numbered import STREAMS, Numbers, Shuffled, Sized, Stateful, load, open_, read, rows_of


@pytest.mark.parametrize("kind", STREAMS)
@given(st.integers(1, 40), st.integers(1, 12), st.booleans(), st.sampled_from([0, 3]))
@settings(max_examples=15, deadline=None)
def test_every_element_once_an_epoch_and_any_world_size_alike(
    kind: Any, count: int, batch_size: int, drop_last: bool, shards: int
) -> None:
    drop_last &= count >= batch_size
    more = {"batch_size": batch_size, "drop_last": drop_last, "shards": shards}
    per_epoch = count // batch_size if drop_last else -(-count // batch_size)
    expected = read(lambda: kind(count), 0, 2 * per_epoch, **more)
    kept = per_epoch * batch_size if drop_last else count
    for epoch in range(2):
        own = [rows[0] for number, _, rows in expected if number == epoch]
        numbers = [int(number) - 1000 * epoch for batch in own for number in batch]
        assert [len(batch) for batch in own[:-1]] == [batch_size] * (per_epoch - 1)
        if kind is Shuffled and drop_last:
            assert len(set(numbers)) == kept
        else:
            assert sorted(numbers) == list(range(kept))
    assert [ends for _, ends, _ in expected] == ([False] * (per_epoch - 1) + [True]) * 2
    for world_size in (2, 3, 5):
        assert read(lambda: kind(count), 0, 2 * per_epoch, world_size, **more) == expected


@pytest.mark.parametrize("kind", STREAMS)
@given(st.integers(1, 60), st.integers(1, 9), st.data())
@settings(max_examples=15, deadline=None)
def test_stopped_anywhere_and_continued_on_another_number_of_processes(
    kind: Any, count: int, batch_size: int, data: st.DataObject
) -> None:
    last = 2 * -(-count // batch_size)
    stop = data.draw(st.integers(1, last))
    worlds = data.draw(st.sampled_from([(1, 2), (3, 1), (2, 5)]))
    expected = read(lambda: kind(count), 0, last, batch_size=batch_size)
    first = open_(kind(count), 0, worlds[0], batch_size=batch_size)
    load(first, 0, stop)
    loaders = [open_(kind(count), rank, worlds[1], batch_size=batch_size) for rank in range(worlds[1])]
    for loader in loaders:
        loader.load_state(copy.deepcopy(first.state()))
    assert rows_of([load(loader, stop, last) for loader in loaders]) == expected[stop:]


def test_a_state_of_its_own_spares_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_STATE_SHARE", 1e9)  # however long it takes on a busy machine
    first, loader = open_(Stateful(1000)), open_(Stateful(1000))
    load(first, 0, 150)
    loader.load_state(first.state())
    before = Stateful.given
    assert load(loader, 150, 151)[0].parts[0].batch[0].tolist() == [750, 751, 752, 753, 754]
    assert 5 < Stateful.given - before < 40


def test_a_state_that_does_not_lead_back_is_noticed() -> None:
    said: list[str] = []
    expected = read(lambda: Shuffled(100), 0, 20)
    first = open_(Shuffled(100))
    load(first, 0, 10)
    loader = open_(Shuffled(100), say=said.append)
    loader.load_state(first.state())
    assert rows_of([load(loader, 10, 20)]) == expected[10:]
    assert "does not lead back to element 50" in said[0]


def test_who_reads_does_not_matter() -> None:
    assert read(lambda: Numbers(33), 0, 14, workers=2) == read(lambda: Numbers(33), 0, 14)


def test_a_process_that_reads_ahead_is_kept() -> None:
    source = open_(Numbers(9), workers=None).source
    waits, idle = Window(0.1, 0.001, 0.1, 0.1), Window(1e-6, 1e-6, 0.0, 1.0)
    assert source._decide(waits, torch.zeros(1))
    assert source._pace.readers == 1
    assert not source._decide(idle, torch.zeros(1))
    assert source._pace.readers == 1


class Lines(Numbers):
    """Reads a file that it keeps open, whose offset all readers share."""

    def __init__(self, path: Path) -> None:
        self.file = path.open()

    def __iter__(self) -> Iterator[Any]:
        self.file.seek(0)
        return map(int, iter(self.file.readline, ""))


def test_reading_continues_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_text("\n".join(map(str, range(100))))
    lines = Lines(path)
    plan = BatchPlan(5, 5)
    for dataset in (Numbers(100), lines):
        here, elsewhere = (StreamReader(dataset, None, plan, None, seed=1) for _ in range(2))
        first = [here.read(Request(0, torch.tensor([step]))) for step in range(3)]
        batches = [elsewhere.read(Request(0, torch.tensor([step]))) for step in range(9)]
        here.follow(8, batches[7].place)
        for ours, theirs in zip(
            [*first, here.read(Request(0, torch.tensor([8])))], [*batches[:3], batches[8]], strict=True
        ):
            assert_same(ours.parts[0][1], theirs.parts[0][1])
    lines.file.close()


def test_looking_at_the_first_elements_changes_nothing() -> None:
    dataset = Stateful(20)
    assert first_rows(dataset, 3, None, 3)[0][0].tolist() == [0, 1, 2]
    assert first_rows(dataset, 50, None, 3)[1] == 20
    assert read(lambda: dataset, 0, 1)[0][2][0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("in_step", [False, True])
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_an_evaluation_has_every_element_once(in_step: bool, count: int, chunk_size: int, world_size: int) -> None:
    seen, lengths = [], set()
    for rank in range(world_size):
        options = LoadOptions(rank=rank, world_size=world_size, seed=0)
        chunks = open_chunks(Numbers(count), chunk_size, options)
        own = list(chunks.read(in_step))
        lengths.add(len(own))
        assert all(rows in (0, len(batch[0])) for batch, rows in own)
        seen += [number for batch, rows in own for number in batch[0].tolist()[:rows]]
        assert chunks.evidence is not None
    assert sorted(seen) == list(range(count))
    assert not in_step or len(lengths) == 1


def test_the_generators_of_the_program_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    read(lambda: Numbers(33), 0, 3)
    list(open_chunks(Numbers(5), 2, LoadOptions(seed=0)).read())
    assert_same(torch.rand(1), expected)


# --- what cannot be ----------------------------------------------------------------------------------------


class Raises(Numbers):
    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            if element[0] == 7:
                raise ValueError("a broken file")
            yield element


class Uneven(Numbers):
    def __iter__(self) -> Iterator[Any]:
        for i in range(self.count):
            yield {"x": torch.zeros(3 if i != 7 else 4), "y": i}


def test_an_element_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ValueError, match="a broken file") as caught:
        read(lambda: Raises(20), 0, 3)
    assert "element 7 of the stream in epoch 0" in caught.value.__notes__[0]


def test_elements_that_cannot_be_stacked_are_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        read(lambda: Uneven(20), 0, 3)
    (note,) = caught.value.__notes__
    assert "the elements 5 to 9" in note
    assert "Element 5 is {'x': float32 (3,), 'y': int}, element 7 is {'x': float32 (4,), 'y': int}." in note


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (Numbers(0), DataError, "no elements in epoch 0"),
        (Sized(0), DataError, "no elements in epoch 0"),
        (Sized(12, 20), DataError, "has ended after 12 elements.*__len__ says 20"),
        (Sized(20, 12), DataError, "has more than 12 elements"),
        ((i for i in range(9)), TaskError, "is a generator, which can be read only once"),
        (DataLoader(Numbers(9)), TaskError, "is a DataLoader"),
        (object(), TaskError, "neither by index nor from its beginning"),
    ],
    ids=["empty", "empty, sized", "too short", "too long", "generator", "DataLoader", "object"],
)
def test_what_cannot_be_is_said(dataset: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(open_(dataset), 0, 4)
    if message.startswith("no elements"):
        with pytest.raises(error, match="no elements"):
            list(open_chunks(dataset, 4, LoadOptions(seed=0)).read())


def test_drop_last_that_leaves_nothing_is_said() -> None:
    with pytest.raises(SpecError, match=r"drop_last leaves no batch.*4 elements"):
        read(lambda: Numbers(4), 0, 1, drop_last=True)


def test_epochs_of_a_stream_without_a_length_need_steps() -> None:
    assert open_(Sized(12)).num_steps(2) == 6
    with pytest.raises(SpecError, match=r"Numbers.*Give --steps, or give the stream a __len__"):
        open_(Numbers(12)).num_steps(2)
    assert (count_samples(Numbers(12), None, 50, 0), count_samples(Numbers(12), None, 5, 0)) == (12, 5)


class Held(IterableDataset[Any]):
    """Holds one iterator, so that whoever reads first takes elements from all others."""

    def __init__(self) -> None:
        self._elements = (i for i in range(40))

    def __iter__(self) -> Iterator[Any]:
        return self._elements


@pytest.mark.parametrize("dataset", [Held(), (i for i in range(40))], ids=["held", "generator"])
def test_what_can_be_read_once_is_refused_by_the_first_look(dataset: Any) -> None:
    for look in (lambda: count_samples(dataset, None, 8, 0), lambda: first_rows(dataset, 8, None, 0)):
        with pytest.raises(TaskError, match=r"a generator.*can be read only once"):
            look()


class Nested(IterableDataset[Any]):
    """Keeps its position in what it is made of."""

    def __init__(self, count: int) -> None:
        self._inner = {"next": 0, "count": count}

    def __iter__(self) -> Iterator[Any]:
        while self._inner["next"] < self._inner["count"]:
            self._inner["next"] += 1
            yield self._inner["next"] - 1
        self._inner["next"] = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self._inner)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner = dict(state)


def test_a_look_at_the_first_elements_takes_none_away() -> None:
    dataset = Nested(12)
    assert first_rows(dataset, 3, None, 0)[0].tolist() == [0, 1, 2]
    assert count_samples(dataset, None, 5, 0) == 5
    batches = load(open_(dataset), 0, 6)
    assert [row for batch in batches for part in batch.parts for row in part.batch.tolist()] == [*range(12)] * 2


class Sieve(IterableDataset[Any]):
    """Draws which elements it gives."""

    def __iter__(self) -> Iterator[Any]:
        yield from (i for i in range(200) if torch.rand(()) < 0.5)


def test_counting_reads_as_an_evaluation_does_and_leaves_the_generators() -> None:
    before = torch.get_rng_state()
    counted = count_samples(Sieve(), None, 1000, 3)
    rows = sum(num_rows for _, num_rows in open_chunks(Sieve(), 8, LoadOptions(seed=3)).read())
    assert counted == rows
    assert torch.equal(torch.get_rng_state(), before)


class Moody(Numbers):
    """A stream with other elements each time."""

    def __iter__(self) -> Iterator[Any]:
        return iter(np.random.default_rng().random(self.count).tolist())


class Shrinking(Numbers):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))


def test_a_stream_that_changes_between_two_runs_is_refused() -> None:
    first = open_(Moody(40))
    load(first, 0, 5)
    loader = open_(Moody(40))
    loader.load_state(first.state())
    with pytest.raises(DataError, match="other elements before element 25 of epoch 0"):
        load(loader, 5, 6)
    first = open_(Shrinking(40))
    load(first, 0, 5)
    loader = open_(Shrinking(20))
    loader.load_state(first.state())
    with pytest.raises(DataError, match=r"ended after 20 elements.*reached element 25"):
        load(loader, 5, 6)


def test_ranks_that_read_different_elements_show_it() -> None:
    alike = [open_(Numbers(40), rank, 2) for rank in range(2)]
    split = [open_(Moody(40), rank, 2) for rank in range(2)]
    reading = [loader.steps(0, 3) for loader in (*alike, *split)]
    for steps in reading:
        next(steps)
    assert alike[0].evidence() == alike[1].evidence() is not None
    assert split[0].evidence() != split[1].evidence()
    next(reading[0])
    assert alike[0].evidence() is None  # once an epoch is enough


class WorkerSharded(Numbers):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(0 if info is None else info.id, self.count, 1 if info is None else info.num_workers))


def test_a_stream_that_splits_itself_among_workers_has_one() -> None:
    for workers in (0, 3):
        batches = load(open_(WorkerSharded(10), workers=workers), 0, 2)
        assert [batch.parts[0].batch.tolist() for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_reading_up_to_a_position_is_reported_if_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_SAY_AFTER_S", 0.0)
    said: list[str] = []
    first = open_(Numbers(400))
    load(first, 0, 50)
    loader = open_(Numbers(400), say=said.append)
    loader.load_state(first.state())
    load(loader, 50, 51)
    assert said[0].startswith("reading the stream up to element 250; ")


class Opaque(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "lock": object()}


def test_a_state_that_a_checkpoint_cannot_hold_is_left_out() -> None:
    loader = open_(Opaque(40))
    load(loader, 0, 5)
    state = loader.state()
    assert state is not None
    assert state["state"] is None
    assert any("state_dict holds a object" in text for text in loader.source.notices)


def test_digests_tell_elements_apart_and_ignore_rounding() -> None:
    x = torch.arange(40.0)
    elements = [0, 1, "a", "b", x, x + 1, {"x": x}, {"y": x}, (x, 1), (x, 2), x.double(), x.reshape(8, 5), None, [1, 2]]
    assert len({digest_of(element) for element in elements}) == len(elements)
    assert digest_of(x / 7) == digest_of(x / 7 * (1 + 2e-7))
    assert digest_of(object()) == digest_of(object())
