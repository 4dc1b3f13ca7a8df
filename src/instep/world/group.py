"""The process group of the lane, for instep and for PyTorch: `init_process_group("instep")`.

Ranks: all of the group. `autoload` registers it with PyTorch.

CPU tensors of ranks that share a node go through shared memory, over several nodes hierarchically ([Note: Hierarchical
all-reduce]). What the lane does not have (point to point, all-to-all, products, complex numbers, …) goes to the gloo
group that every SharedGroup holds, and so does everything where memory cannot be shared; `refusal` says why.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from instep.world.background import Background, completed
from instep.world.hierarchical import Hierarchical
from instep.world.lane.lane import Lane, Steps
from instep.world.lane.reduction import DTYPES, Reduction, divide
from instep.world.lane.rendezvous import open_lane
from instep.world.tensors import as_bytes, flattened, row_of
from instep.world.waits import WAITS

_REDUCTIONS = (
    (dist.ReduceOp.SUM, Reduction.SUM),
    (dist.ReduceOp.AVG, Reduction.MEAN),
    (dist.ReduceOp.MAX, Reduction.MAX),
    (dist.ReduceOp.MIN, Reduction.MIN),
)
_SPIN_S = 500e-6
"""How long an asynchronous operation may keep its caller."""


class SharedGroup(dist.ProcessGroup):
    """Ranks that communicate through shared memory where they can, and over gloo where they cannot."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        global_ranks: Sequence[int] | None = None,
        label: str | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._gloo = GlooFallback(gloo)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.lane, self.plan, self.refusal = open_lane(
            dist.PrefixStore("lane", store), rank, size, timeout, global_ranks=global_ranks, label=label
        )
        self._hierarchical: Hierarchical | None = None
        if not self.refusal and len(self.plan.nodes) > 1:
            self._hierarchical = Hierarchical(self.lane, self.plan, rank, store, timeout)
        # With spare cores a thread works beside the caller; without, it would only take turns with it.
        spare = len(os.sched_getaffinity(0)) > size * torch.get_num_threads()
        self._begins = self.lane is not None and self._hierarchical is None and not spare
        self._background = Background()

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks share one machine's memory."""
        return not self.refusal and len(self.plan.nodes) == 1

    def describe(self) -> str:
        """Return in a few words what this group communicates over."""
        if self.refusal:
            return "gloo"
        nodes = len(self.plan.nodes)
        return "shared memory" if nodes == 1 else f"shared memory and gloo between {nodes} nodes"

    def all_reduce_now(self, tensor: torch.Tensor) -> None:
        """Sum the ranks' tensors, in place, without options or a work object. Called on all ranks."""
        if self.refusal or tensor.dtype not in DTYPES:
            self._gloo.allreduce([tensor], dist.AllreduceOptions()).wait()
        else:
            self.run_now(self._reduce([tensor], Reduction.SUM))

    def can_coalesce(self, dtype: torch.dtype) -> bool:
        """Return whether the lane's `all_reduce_coalesced` supports a dtype; the same on all ranks."""
        return self.lane is not None and self._hierarchical is None and self.lane.can_coalesce(dtype)

    def can_ordered_reduce(self, out: torch.Tensor) -> bool:
        """Return whether the lane's `ordered_reduce` supports a tensor, which all ranks must share a node for."""
        return not self.refusal and self._hierarchical is None and out.dtype in DTYPES and out.device.type == "cpu"

    def run_now(self, steps: Steps) -> None:
        """Run a collective of the lane in the caller's thread, after the asynchronous ones. Called on all ranks."""
        self._background.drain()
        self._run(steps)

    # Called by PyTorch, under PyTorch's names.

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "instep"

    def shutdown(self) -> None:
        """Leave the group; inform ranks that still wait for this one. Issues no collective."""
        self._background.end()
        if self.lane is not None:
            self.lane.peers.leave()
            self.lane, self.refusal = None, "the group was shut down"
        super().shutdown()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Combine the ranks' tensors, in place."""
        opts = opts or dist.AllreduceOptions()
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        how = self._reduction(opts.reduceOp, tensors)
        if how is None:
            return self._gloo.allreduce(tensors, opts)
        return self._do(self._reduce(tensors, how), tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Combine the ranks' tensors, in place."""
        opts = opts or dist.AllreduceCoalescedOptions()
        how = self._reduction(opts.reduceOp, tensors)
        if how is None:
            return self._gloo.allreduce_coalesced(tensors, opts)
        return self._do(self._reduce(tensors, how), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Overwrite the tensors with one rank's."""
        opts = opts or dist.BroadcastOptions()
        if not self._can(tensors):
            return self._gloo.group.broadcast(list(tensors), opts)
        return self._do(self._broadcast(tensors, opts.rootRank), tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        """Wait until every rank is here."""
        opts = opts or dist.BarrierOptions()
        if self.refusal:
            return self._gloo.group.barrier(opts)
        return self._do((self._hierarchical or self.own_lane).barrier(), [], opts)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Collect the ranks' tensors in lists."""
        opts = opts or dist.AllgatherOptions()
        fits = all(self._fit(outs, own) for outs, own in zip(output_lists, inputs, strict=True))
        if not fits or not self._can_on_node(inputs):
            return self._gloo.group.allgather(output_lists, inputs, opts)
        return self._do(self._gather(output_lists, inputs), output_lists, opts)

    def _allgather_base(self, output: Any, own: Any, opts: Any = None) -> Any:
        """Collect the ranks' tensors in one, one after the other."""
        return self.allgather_into_tensor_coalesced([output], [own], opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Collect the ranks' tensors, several at once."""
        opts = opts or dist.AllgatherOptions()
        for output, own in zip(outputs, inputs, strict=True):
            _check_whole("all_gather", whole=output, part=own, size=self.size())
        if not self._can_on_node(inputs):
            return self._gloo.allgather_into_tensor_coalesced(outputs, inputs, opts)
        return self._do(self._gather_whole(outputs, inputs), outputs, opts)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        """Combine, for each rank, the parts meant for it."""
        opts = opts or dist.ReduceScatterOptions()
        how = self._reduction(opts.reduceOp, outputs)
        fits = all(self._fit(parts, out) for parts, out in zip(input_lists, outputs, strict=True))
        if how is None or self._hierarchical is not None or not fits:
            return self._gloo.reduce_scatter(outputs, input_lists, opts)
        return self._do(self._scatter(outputs, input_lists, how), outputs, opts)

    def _reduce_scatter_base(self, output: Any, whole: Any, opts: Any = None) -> Any:
        """Combine, for each rank, its part of the input."""
        return self.reduce_scatter_tensor_coalesced([output], [whole], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Combine, for each rank, its part of each input."""
        opts = opts or dist.ReduceScatterOptions()
        for output, whole in zip(outputs, inputs, strict=True):
            _check_whole("reduce_scatter", whole=whole, part=output, size=self.size())
        how = self._reduction(opts.reduceOp, outputs)
        if how is None or self._hierarchical is not None:
            return self._gloo.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return self._do(self._scatter_whole(outputs, inputs, how), outputs, opts)

    def alltoall_base(self, *arguments: Any) -> Any:
        """Exchange parts of a tensor between all ranks."""
        return self._gloo.group.alltoall_base(*arguments)

    def send(self, *arguments: Any) -> Any:
        """Send tensors to one rank."""
        return self._gloo.group.send(*arguments)

    def recv(self, *arguments: Any) -> Any:
        """Receive tensors from one rank."""
        return self._gloo.group.recv(*arguments)

    all_to_all_single = alltoall_base
    # torch 2.13 has new names for these, and calls those; 2.11 knows only the old ones.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # The operations themselves, in either thread.

    def _reduce(self, tensors: Sequence[torch.Tensor], how: Reduction) -> Steps:
        way = self._hierarchical or self.own_lane
        for tensor in tensors:
            with flattened(tensor) as flat:
                yield from way.all_reduce(flat, how)

    def _broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> Steps:
        node, local_rank = self.plan.where(root)
        for tensor in tensors:
            with flattened(tensor) as flat:
                if self._hierarchical is not None:
                    yield from self._hierarchical.broadcast(as_bytes(flat), node, local_rank)
                else:
                    yield from self.own_lane.broadcast(as_bytes(flat), local_rank)

    def _gather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Steps:
        for outs, own in zip(outputs, inputs, strict=True):
            with contextlib.ExitStack() as stack:
                flats = [as_bytes(stack.enter_context(flattened(out))) for out in outs]
                yield from self.own_lane.all_gather(flats, as_bytes(row_of(own)))

    def _gather_whole(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Steps:
        for output, own in zip(outputs, inputs, strict=True):
            with flattened(output) as flat:
                parts = [as_bytes(part) for part in flat.split(own.numel())] if own.numel() else []
                yield from self.own_lane.all_gather(parts, as_bytes(row_of(own)))

    def _scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], how: Reduction
    ) -> Steps:
        for out, parts in zip(outputs, inputs, strict=True):
            with flattened(out) as flat:
                yield from self.own_lane.reduce_scatter(flat, [row_of(part) for part in parts], how)

    def _scatter_whole(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], how: Reduction) -> Steps:
        # A view, or a copy made now and not at the call: earlier operations may still write to it.
        parts = (row_of(whole).split(max(1, output.numel())) for output, whole in zip(outputs, inputs, strict=True))
        for output, own_parts in zip(outputs, parts, strict=True):
            yield from self._scatter([output], [own_parts], how)

    @property
    def own_lane(self) -> Lane:
        """The lane, where there is one."""
        assert self.lane is not None
        return self.lane

    def _run(self, steps: Steps) -> None:
        if self.lane is not None:
            self.lane.run(steps)
        else:  # alone on its node: no rank to wait for at a barrier
            for _ in steps:
                pass

    def _do(self, steps: Steps, result: Any, opts: Any) -> Any:
        """Run an operation here, or in the background ([Note: Two ways in])."""
        if self._background.is_here:
            self.run_now(steps)
            return completed(result)
        with WAITS:
            if not opts.asyncOp:
                self.run_now(steps)
                return completed(result)
            if not self._begins or self._background.busy:
                return self._background.submit(lambda: self._run(steps), result)
            rest = self.own_lane.begin(steps, _SPIN_S)
            return completed(result) if rest is None else self._background.submit(rest, result)

    # What the lane supports.

    def _can(self, tensors: Sequence[torch.Tensor]) -> bool:
        return not self.refusal and all(t.device.type == "cpu" and t.layout == torch.strided for t in tensors)

    def _fit(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> bool:
        """Return whether there is one part per rank, all of one size; otherwise gloo does it, or refuses."""
        return len(parts) == self.size() and all(part.nbytes == own.nbytes for part in parts)

    def _can_on_node(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the lane can do an operation that it has on one node only."""
        return self._hierarchical is None and self._can(tensors)

    def _reduction(self, op: Any, tensors: Sequence[torch.Tensor]) -> Reduction | None:
        """Return the lane's name of a reduction; None: it goes to gloo."""
        if not self._can(tensors) or any(t.dtype not in DTYPES for t in tensors):
            return None
        return next((reduction for theirs, reduction in _REDUCTIONS if op == theirs), None)


def _check_whole(what: str, *, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    if whole.numel() != size * part.numel():
        raise ValueError(
            f"{what}: {size} parts of {part.numel()} elements are {size * part.numel()}, and the whole tensor has "
            f"{whole.numel()}. Use one that is {size} times as large as the part."
        )


class GlooFallback:
    """The gloo group inside a SharedGroup, with what PyTorch expects of a group.

    [Note: Never through the base class]
    torch's ProcessGroup would dispatch an operation to gloo by itself, but for a class written in Python it holds the
    GIL while it waits for a lock of gloo's; a gloo thread that holds the lock waits for the GIL to release a tensor. So
    gloo's group is called directly here, which releases the GIL. Besides, gloo supports neither strides nor means of
    every dtype.
    """

    def __init__(self, group: dist.ProcessGroupGloo) -> None:
        self.group = group

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Combine the ranks' tensors, in place."""
        if all(t.layout != torch.strided or t.is_contiguous() for t in tensors):
            return self._with_mean(tensors, opts, lambda: self.group.allreduce(list(tensors), opts))
        copies = [t.detach().contiguous() for t in tensors]
        self._with_mean(copies, opts, lambda: self.group.allreduce(copies, opts)).wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.detach().copy_(copy)
        return completed(list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Combine the ranks' tensors, in place."""
        return self._with_mean(tensors, opts, lambda: self.group.allreduce_coalesced(list(tensors), opts))

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Collect the ranks' tensors, each in one output."""
        works = [self.group._allgather_base(out, own, opts) for out, own in zip(outputs, inputs, strict=True)]
        return _all(works, outputs)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any) -> Any:
        """Combine, for each rank, the parts meant for it."""
        return self._with_mean(outputs, opts, lambda: self.group.reduce_scatter(outputs, input_lists, opts))

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Combine, for each rank, its part of each input."""

        def run() -> Any:
            pairs = zip(outputs, inputs, strict=True)
            return _all([self.group._reduce_scatter_base(out, whole, opts) for out, whole in pairs], outputs)

        return self._with_mean(outputs, opts, run)

    def _with_mean(self, outputs: Sequence[torch.Tensor], opts: Any, run: Callable[[], Any]) -> Any:
        if opts.reduceOp != dist.ReduceOp.AVG:
            return run()
        opts.reduceOp = dist.ReduceOp.SUM
        run().wait()
        for output in outputs:
            divide(output.detach(), self.group.size())
        return completed(list(outputs))


def _all(works: Sequence[Any], result: Any) -> Any:
    """Return one work for several."""
    if len(works) == 1:
        return works[0]
    for work in works:
        work.wait()
    return completed(result)
