"""The repeated blocks of a model: which modules they are."""

from __future__ import annotations

import pytest
from torch import nn

from instep.core.errors import TaskError
from instep.parallel.blocks import blocks_of, find_blocks
from instep.parallel.fsdp import own_blocks


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)])


class Deep(nn.Module):
    """Blocks in a list, and layers around them that are larger than all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Sequential(nn.Linear(4, 1000), nn.Linear(1000, 1000))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])


class TwoStacks(nn.Module):
    """Two of a class that only holds lists, as encoder and decoder often are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(), Stack()


class Attributes(nn.Module):
    """Blocks that are no one's list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)
        self.norm, self.other_norm = nn.LayerNorm(4), nn.LayerNorm(4)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(2) for _ in range(5)])
        self.a, self.b = nn.Linear(100, 100), nn.Linear(100, 100)


def stages() -> nn.Module:
    stage = [nn.Sequential(Block(), Block()) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 4), *stage, nn.Linear(4, 4))


def shared() -> nn.Module:
    return nn.Sequential(*[Block()] * 3)


CASES = [
    (Deep, ["blocks.0", "blocks.1", "blocks.2"]),
    (TwoStacks, ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]),
    (Attributes, ["first", "second"]),
    (Layers, []),
    (stages, ["1.0", "1.1", "2.0", "2.1"]),
    (shared, ["0.experts.0", "0.experts.1", "0.experts.2"]),
    (
        lambda: nn.Transformer(4, 2, 2, 2, 8, batch_first=True),
        [f"{part}.layers.{n}" for part in ("encoder", "decoder") for n in (0, 1)],
    ),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU()), []),
    (lambda: nn.Linear(4, 4), []),
]


@pytest.mark.parametrize(("make", "names"), CASES)
def test_blocks(make: type[nn.Module], names: list[str]) -> None:
    model = make()
    result = find_blocks(model)
    assert [name for name, _ in result] == names
    assert all(model.get_submodule(name) is module for name, module in result)


def test_a_task_may_name_the_blocks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert blocks_of(model, lambda m: [m[0], m[1]]) == [("0", model[0]), ("1", model[1])]
    assert [name for name, _ in own_blocks(model, lambda m: [m[2]])] == ["2"]
    with pytest.raises(TaskError, match="returned a Linear at position 1 that is no module inside the model"):
        blocks_of(model, lambda m: [m[0], nn.Linear(2, 2)])
