"""Fingerprints: any one bit is seen, and so is who has drifted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from instep.guard.fingerprint import Drift, buffers_of, find_drift, fingerprint, fingerprints, updated_state

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bytes of a tensor, to be written to."""
    return tensor.view(-1).view(torch.uint8)


def made(dtype: torch.dtype, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty((), dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    return torch.randint(0, 256, (size * width,), generator=generator, dtype=torch.uint8).view(dtype)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.one_of(st.integers(1, 70), st.sampled_from([2**15 - 1, 2**15, 2**15 + 1, 70_001])),
    st.integers(0, 5),
    st.data(),
)
def test_any_flipped_bit_changes_it(dtype: torch.dtype, size: int, seed: int, data: st.DataObject) -> None:
    tensor = made(dtype, size, seed)
    before = int(fingerprint(tensor))
    raw = bits_of(tensor)
    place = data.draw(st.integers(0, raw.numel() - 1))
    bit = 0 if dtype == torch.bool else data.draw(st.integers(0, 7))
    raw[place] ^= 1 << bit
    assert int(fingerprint(tensor)) != before
    raw[place] ^= 1 << bit
    assert int(fingerprint(tensor)) == before


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]), st.integers(2, 70_000), st.data())
def test_two_that_change_places_are_seen(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """Also round numbers, whose bits differ at the top only."""
    tensor = torch.zeros(size, dtype=dtype)
    one, other = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    tensor[one], tensor[other] = 1.0, 2.0
    before = int(fingerprint(tensor))
    tensor[one], tensor[other] = 2.0, 1.0
    assert int(fingerprint(tensor)) != before


def test_what_is_laid_out_otherwise_is_the_same() -> None:
    whole = torch.randn(40, 30)
    assert int(fingerprint(whole.t())) == int(fingerprint(whole.t().contiguous()))
    assert int(fingerprint(whole[1:])) == int(fingerprint(whole[1:].clone()))
    assert int(fingerprint(torch.zeros(0))) == 0
    assert int(fingerprint(torch.tensor(3.0))) != int(fingerprint(torch.tensor(4.0)))
    assert int(fingerprint(whole.to_sparse())) == int(fingerprint(whole))
    assert fingerprints([whole, torch.ones(2), torch.zeros(0)]).tolist() == [
        int(fingerprint(whole)),
        int(fingerprint(torch.ones(2))),
        0,
    ]
    assert fingerprints([]).tolist() == []


def test_tensors_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("seen", torch.zeros(2))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    names = list(updated_state(model, optimizer))
    assert names[:3] == [f"optimizer {key} of 0.weight" for key in ("step", "exp_avg", "exp_avg_sq")]
    assert names[-4:] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    statistics, others = buffers_of(model)
    assert list(statistics) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert list(others) == ["seen"]


def test_lists_in_an_optimizers_state_are_named_too() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert "optimizer old_dirs[0] of weight" in updated_state(model, optimizer)


A, B = {"w": 1, "b": 2}, {"w": 1, "b": 3}


@pytest.mark.parametrize(
    ("by_rank", "drift"),
    [
        ([A, A, A], None),
        ([A, B], Drift(("b",), (0, 1), 2)),
        ([A, B, A], Drift(("b",), (1,), 3)),
        ([B, A, A], Drift(("b",), (0,), 3)),
        ([A, B, B, A], Drift(("b",), (0, 1, 2, 3), 4)),
        ([A, {"w": 5, "b": 5}, B, A, A], Drift(("w", "b"), (1, 2), 5)),
        ([A, A, A | {"x": 1}], Drift(("x",), (2,), 3)),
        ([{"w": 1}, {"w": 2}, {"w": 3}], Drift(("w",), (0, 1, 2), 3)),
    ],
)
def test_who_has_drifted(by_rank: list[dict[str, int]], drift: Drift | None) -> None:
    assert find_drift(dict(enumerate(by_rank))) == drift


def test_it_is_said_who() -> None:
    assert str(Drift(("w",), (2,), 3)) == "rank 2 differs from the other 2 in w"
    assert str(Drift(("w", "b", "c"), (1, 2), 5)) == "ranks 1, 2 differ from the other 3 in w (and in b and 1 more)"
    assert "either may be wrong" in str(Drift(("w",), (0, 1), 2))
