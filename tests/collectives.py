"""Collectives to try on a group of ranks, and what they must give: groups are compared by these."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
STRIDES = ("contiguous", "transposed", "every second")


@dataclass(frozen=True)
class Case:
    """One call of a collective; `numel` is how much it brings each rank, before a gathering."""

    operation: str
    numel: int
    op: str = "sum"
    dtype: torch.dtype = torch.float32
    stride: str = "contiguous"
    asynchronous: bool = False
    seed: int = 0
    """Decides the numbers, and which rank a broadcast comes from."""

    @property
    def scatters(self) -> bool:
        """Whether each rank gets another part of the result."""
        return self.operation.startswith("reduce_scatter")


def group_on(num_cores: int, backend: str = "instep") -> Any:
    """Make a group of all ranks that finds so many cores. Called on all ranks."""
    os.sched_getaffinity = lambda _: set(range(num_cores))  # type: ignore[assignment]
    return dist.new_group(backend=backend)


def inputs_of(case: Case, world_size: int) -> list[torch.Tensor]:
    """Make what the ranks bring: every rank can make all of it. Floats have zeros of both signs among them."""
    generator = torch.Generator().manual_seed(case.seed)
    numel = case.numel * world_size if case.scatters else case.numel
    shift = 31  # windows of one row: other numbers at each place, for little more than one rank's
    if case.dtype.is_floating_point:
        row = torch.randn(numel + shift * world_size, generator=generator)
        row = torch.where(row.abs() < 0.3, row * 0.0, row).to(case.dtype)
    else:
        limit = torch.iinfo(case.dtype).max
        row = torch.randint(-limit, limit, (numel + shift * world_size,), generator=generator, dtype=case.dtype)
    return [row[shift * rank : shift * rank + numel].clone() for rank in range(world_size)]


def laid_out(numbers: torch.Tensor, case: Case) -> torch.Tensor:
    """Return the same numbers in the same order, in memory that is laid out as the case says."""
    if case.stride == "every second":
        return numbers.new_zeros(2 * numbers.numel())[::2].copy_(numbers)
    if case.stride == "transposed":
        columns = next((n for n in (2, 3, 5, 7) if case.numel % n == 0), 1)
        return numbers.view(-1, columns).t().clone(memory_format=torch.contiguous_format).t()
    return numbers.clone()


def run(case: Case, group: Any, numbers: torch.Tensor) -> torch.Tensor:
    """Do it with this rank's numbers; give what came out, as one row. Called on all ranks."""
    size = group.size()
    own = laid_out(numbers, case)
    more = {"group": group, "async_op": case.asynchronous}
    outs = [own]
    work = None
    match case.operation:
        case "all_reduce":
            work = dist.all_reduce(own, OPS[case.op], **more)
        case "broadcast":
            work = dist.broadcast(own, group_src=case.seed % size, **more)
        case "all_gather":
            outs = [laid_out(torch.zeros_like(numbers), case) for _ in range(size)]
            work = dist.all_gather(outs, own, **more)
        case "all_gather_into_tensor":
            outs = [own.new_zeros(size * own.shape[0], *own.shape[1:])]
            work = dist.all_gather_into_tensor(outs[0], own, **more)
        case "reduce_scatter":
            outs = [laid_out(numbers.new_zeros(case.numel), case)]
            parts = [laid_out(part, case) for part in numbers.chunk(size)]
            work = dist.reduce_scatter(outs[0], parts, OPS[case.op], **more)
        case "reduce_scatter_tensor":
            outs = [laid_out(numbers.new_zeros(case.numel), case)]
            work = dist.reduce_scatter_tensor(outs[0], own, OPS[case.op], **more)
        case "barrier":
            work = dist.barrier(**more)
    if work is not None:
        work.wait()
    return torch.cat([out.reshape(-1) for out in outs])


def run_by_gloo(case: Case, gloo: Any, numbers: torch.Tensor) -> torch.Tensor:
    """Do the same over gloo, as far as it can: contiguous, and a mean as a sum that is divided. Called on all ranks."""
    plain = replace(case, stride="contiguous", asynchronous=False, op="sum" if case.op == "avg" else case.op)
    total = run(plain, gloo, numbers)
    return mean_of(total, gloo.size()) if reduces(case) and case.op == "avg" else total


def reduces(case: Case) -> bool:
    """Return whether numbers are computed, not only brought."""
    return case.operation == "all_reduce" or case.scatters


def expected(case: Case, inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Say what a rank must get: float sums in the order of the inputs, halves rounded once."""
    if case.scatters:
        return in_order(case.op, [whole.chunk(len(inputs))[rank] for whole in inputs])
    match case.operation:
        case "all_reduce":
            return in_order(case.op, inputs)
        case "broadcast":
            return inputs[case.seed % len(inputs)]
        case "all_gather" | "all_gather_into_tensor":
            return torch.cat(inputs)
    return inputs[rank]


def is_in_order(case: Case, actual: torch.Tensor, inputs: list[torch.Tensor], rank: int) -> bool:
    """Return whether every number has the bits of the sum in the order of the ranks, from some rank on."""
    starts = range(len(inputs)) if case.operation == "all_reduce" else [0]
    rights = [expected(case, inputs[start:] + inputs[:start], rank) for start in starts]
    if any(actual.dtype != right.dtype or actual.shape != right.shape for right in rights):
        return False
    # Which of 0 and -0 is the larger one is for the ranks to agree on, nothing more.
    seen = actual if reduces(case) and case.op in ("max", "min") else actual.view(BITS[actual.itemsize])
    return bool(torch.stack([seen == right.view(seen.dtype) for right in rights]).any(0).all())


def in_order(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Combine one rank after the other."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        if op in ("sum", "avg"):
            total = total + part.to(wide)
        else:
            total = (torch.maximum if op == "max" else torch.minimum)(total, part.to(wide))
    return (mean_of(total, len(parts)) if op == "avg" else total).to(dtype)


def mean_of(total: torch.Tensor, count: int) -> torch.Tensor:
    """Divide; integers towards zero."""
    return torch.div(total, count, rounding_mode=None if total.dtype.is_floating_point else "trunc")


def is_near(case: Case, one: torch.Tensor, other: torch.Tensor, inputs: list[torch.Tensor], rank: int) -> bool:
    """Return whether two results differ by no more than another order of the additions can make them."""
    if not (reduces(case) and case.dtype.is_floating_point and case.op in ("sum", "avg")):
        return torch.equal(one, other)
    sizes = expected(replace(case, op="sum"), [part.abs().double() for part in inputs], rank)
    bound = sizes * torch.finfo(case.dtype).eps * len(inputs)
    return one.shape == other.shape and bool(((one.double() - other.double()).abs() <= bound).all())


def digest(tensor: torch.Tensor) -> str:
    """Name a tensor's bits in a few letters, for comparison between ranks."""
    row = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(row.numpy(), digest_size=8).hexdigest()
