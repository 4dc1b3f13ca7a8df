"""Floats in fewer bytes: every bit comes back, gradients take less, and a damaged message is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.core.errors import PeerLost
from instep.world.float_codec import FloatCodec, load_codec

LOADED = load_codec()
pytestmark = pytest.mark.skipif(LOADED is None, reason="no C compiler was there when instep was installed")


@pytest.fixture
def codec() -> FloatCodec:
    assert LOADED is not None
    return LOADED


def coded(codec: FloatCodec, bits: np.ndarray) -> tuple[torch.Tensor, int]:
    """Return the buffer of a message, which holds something else beyond it, and the bytes of the message."""
    floats = torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())
    buffer = torch.full((codec.bound(len(bits)),), 0xAB, dtype=torch.uint8)
    return buffer, codec.encode(floats, buffer).numel()


def check(codec: FloatCodec, bits: np.ndarray) -> int:
    buffer, size = coded(codec, bits)
    back = torch.full((len(bits),), 3.0)
    codec.decode(buffer, back)
    assert np.array_equal(back.numpy().view(np.uint32), bits.astype(np.uint32))
    assert size <= codec.bound(len(bits))
    return size


FEW = st.sampled_from([0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFFC00001, 0x3F800000, 0xBF800000, 0x00800000])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(FEW, st.integers(0, 2**32 - 1)), max_size=70))
def test_any_bits_come_back(values: list[int]) -> None:
    assert LOADED is not None
    check(LOADED, np.array(values, dtype=np.uint64))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 30_000), st.integers(1, 256), st.floats(0, 1), st.floats(0.05, 0.95))
def test_any_mixture_of_exponents_comes_back(seed: int, count: int, kinds: int, zeros: float, skew: float) -> None:
    """Skewed counts make codes that are longer than the longest that is allowed."""
    assert LOADED is not None
    random = np.random.default_rng(seed)
    exponents = random.permutation(256)[np.minimum(random.geometric(skew, count) - 1, kinds - 1)].astype(np.uint64)
    bits = (exponents << 23) | random.integers(0, 2**23, count, dtype=np.uint64)
    bits |= random.integers(0, 2, count, dtype=np.uint64) << 31
    bits[random.random(count) < zeros] = 0
    check(LOADED, bits)


def test_a_gradient_takes_less(codec: FloatCodec) -> None:
    gradient = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    assert check(codec, gradient.view(np.uint32)) < 0.85 * gradient.nbytes
    gradient[::2] = 0.0
    assert check(codec, gradient.view(np.uint32)) < 0.48 * gradient.nbytes
    noise = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64)
    assert check(codec, noise) <= 4 * len(noise) + 4  # and what cannot be coded, not more


def test_decoding_adds(codec: FloatCodec) -> None:
    one, other = torch.randn(1001), torch.randn(1001)
    buffer = torch.empty(codec.bound(1001), dtype=torch.uint8)
    codec.encode(one, buffer)
    total = other.clone()
    codec.decode(buffer, total, add=True)
    assert torch.equal(total, one + other)


def test_a_damaged_message_is_refused_or_read_and_nothing_else_is_touched(codec: FloatCodec) -> None:
    random = np.random.default_rng(5)
    bits = random.standard_normal(5000).astype(np.float32).view(np.uint32)
    refused = 0
    for _ in range(300):
        buffer, size = coded(codec, bits)
        for _ in range(random.integers(1, 20)):
            buffer[random.integers(0, min(size, random.choice([4, 170, size])))] = int(random.integers(0, 256))
        room = torch.full((5000 + 64,), 7.0)
        try:
            codec.decode(buffer, room[32:-32])
        except PeerLost:
            refused += 1
        assert torch.equal(room[:32], torch.full((32,), 7.0))
        assert torch.equal(room[-32:], torch.full((32,), 7.0))
    assert refused > 100


def test_what_cannot_be_coded_is_refused(codec: FloatCodec) -> None:
    buffer = torch.empty(codec.bound(8), dtype=torch.uint8)
    with pytest.raises(TypeError, match="float32"):
        codec.encode(torch.zeros(8, dtype=torch.float64), buffer)
    with pytest.raises(ValueError, match="too small"):
        codec.encode(torch.zeros(8), buffer[:-1])
