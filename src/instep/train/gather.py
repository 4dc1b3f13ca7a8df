"""Gather rows: what the ranks computed for their rows of a batch, together, in the data's order.

[Note: Gathering rows]
A rank's rows may be more or fewer than another's, several pieces or none, or rows that it computed only because the
others did. So each rank says first what it has: for each piece its place in the order, and how many of its rows count.
Values travel as bytes, padded to the longest, so that any dtype arrives as it was sent.

Ranks: all that share a batch, alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from instep.core.errors import TaskError
from instep.core.plural import plural
from instep.world.tensors import as_bytes, row_of
from instep.world.world import World


class Piece(NamedTuple):
    """Some of this rank's rows."""

    place: int
    """Its place in the order of all ranks' pieces."""
    num_rows: int
    counted: bool = True
    """Whether these rows are this rank's to give."""


def gather_rows(world: World, pieces: Sequence[Piece], values: Sequence[Any]) -> Any:
    """Return all ranks' counted rows as one value, nested like each of `values`. Called on all ranks.

    There is a value for each piece: a tensor, or tensors in dicts, lists and tuples, whose first dimension is the
    piece's rows.
    """
    form: Any = None
    own: list[list[torch.Tensor]] = []
    problem = ""
    try:
        form, own = _own_rows(pieces, values)
    except TaskError as error:
        problem = str(error)
    counts = [[piece.place, piece.num_rows] for piece in pieces if piece.counted]
    told = world.all_gather_object({"form": form, "pieces": counts, "problem": problem})
    form = _agreed_form(told)
    counted = [tensors for piece, tensors in zip(pieces, own, strict=True) if piece.counted]
    rows = _exchange(world, _leaves(form), counted, [sum(n for _, n in entry["pieces"]) for entry in told])
    places = [(place, num_rows) for entry in told for place, num_rows in entry["pieces"]]
    order = sorted(range(len(places)), key=lambda i: places[i][0])
    sizes = [num_rows for _, num_rows in places]
    device = own[0][0].device if own and own[0] else world.device
    ordered = (torch.cat([leaf.split(sizes)[i] for i in order]).to(device) for leaf in rows)
    return _rebuild(form, ordered)


def _own_rows(pieces: Sequence[Piece], values: Sequence[Any]) -> tuple[Any, list[list[torch.Tensor]]]:
    """Return the form of this rank's values, None if it has none, and the tensors of each; raise TaskError."""
    if len(values) != len(pieces):
        raise TaskError(f"gather got {plural(len(values), 'value')} for {plural(len(pieces), 'batch', 'batches')}.")
    tensors = [
        [tensor.detach() for tensor in _tensors(value, piece.num_rows)]
        for piece, value in zip(pieces, values, strict=True)
    ]
    forms = [_form(value) for value in values]
    if any(form != forms[0] for form in forms):
        raise TaskError("gather got values of different shapes, or nested differently, for the shards of one step.")
    return forms[0] if forms else None, tensors


def _exchange(
    world: World, leaves: list[tuple[torch.dtype, list[int]]], own: Sequence[list[torch.Tensor]], num_rows: list[int]
) -> list[torch.Tensor]:
    """Return the rows of all ranks, by rank, for each of the leaves. Called on all ranks."""
    row_bytes = [torch.empty(shape, dtype=dtype, device="meta").nbytes for dtype, shape in leaves]
    flat = [as_bytes(row_of(_real(piece[i])).to(world.device)) for i in range(len(leaves)) for piece in own]
    most = sum(row_bytes) * max(num_rows)
    padded = torch.zeros(most, dtype=torch.uint8, device=world.device)
    if flat:
        sent = torch.cat(flat)
        padded[: sent.numel()] = sent
    received = world.all_gather(padded) if most else [padded] * len(num_rows)
    gathered: list[list[torch.Tensor]] = [[] for _ in leaves]
    for rank, count in enumerate(num_rows):
        pieces = received[rank][: count * sum(row_bytes)].split([count * size for size in row_bytes])
        for i, (dtype, shape) in enumerate(leaves):
            gathered[i].append(pieces[i].clone().view(dtype).view(count, *shape))
    return [torch.cat(parts) for parts in gathered]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of which bytes can be taken; a row of a single element may have any stride and be contiguous."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


def _tensors(value: Any, num_rows: int) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value, in order; raise TaskError for what cannot be gathered."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or value.shape[0] != num_rows:
            raise TaskError(
                f"gather got a tensor of shape {list(value.shape)} for a batch of {plural(num_rows, 'sample')}. The "
                "first dimension must be the samples."
            )
        yield value
    elif type(value) is dict and all(isinstance(name, str) for name in value):
        for item in value.values():
            yield from _tensors(item, num_rows)
    elif type(value) in (list, tuple):
        for item in value:
            yield from _tensors(item, num_rows)
    else:
        raise TaskError(
            f"gather got a {type(value).__name__}. Give tensors with one row for each sample, also in dicts (by "
            "text), lists and tuples."
        )


def _form(value: Any) -> Any:
    """Describe a nested value as JSON: how it is nested, and the dtype and shape of a row of each tensor."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape[1:])}
    if isinstance(value, dict):
        return {"dict": [[name, _form(item)] for name, item in value.items()]}
    return {type(value).__name__: [_form(item) for item in value]}


def _agreed_form(told: Sequence[dict[str, Any]]) -> Any:
    """Return the form of all ranks' values; raise TaskError, on all ranks alike, if they differ."""
    for rank, entry in enumerate(told):
        if entry["problem"]:
            raise TaskError(f"rank {rank}: {entry['problem']}" if len(told) > 1 else entry["problem"])
    forms = {rank: entry["form"] for rank, entry in enumerate(told) if entry["form"] is not None}
    first = min(forms)
    for rank, form in forms.items():
        if form != forms[first]:
            raise TaskError(
                f"gather got {_shown(form)} on rank {rank}, and {_shown(forms[first])} on rank {first}. Rows must have "
                "the same dtype and shape to be put together: pad them to one length."
            )
    return forms[first]


def _shown(form: Any) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{shape}" for dtype, shape in _leaves(form))


def _leaves(form: Any) -> list[tuple[torch.dtype, list[int]]]:
    if "dtype" in form:
        return [(getattr(torch, form["dtype"]), form["shape"])]
    ((kind, items),) = form.items()
    return [leaf for item in items for leaf in _leaves(item[1] if kind == "dict" else item)]


def _rebuild(form: Any, leaves: Iterator[torch.Tensor]) -> Any:
    if "dtype" in form:
        return next(leaves)
    ((kind, items),) = form.items()
    if kind == "dict":
        return {name: _rebuild(item, leaves) for name, item in items}
    rebuilt = [_rebuild(item, leaves) for item in items]
    return tuple(rebuilt) if kind == "tuple" else rebuilt
