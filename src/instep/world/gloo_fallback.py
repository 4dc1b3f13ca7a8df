"""The operations that the lane does not have, over gloo.

[Note: Never through the base class]
torch's ProcessGroup would dispatch an operation to gloo by itself, but for a class written in Python it holds the GIL
while it waits for a lock of gloo's; a gloo thread that holds the lock waits for the GIL to release a tensor. So gloo's
group is called directly here, which releases the GIL. Besides, gloo supports neither strides nor means of every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from instep.world.background import completed
from instep.world.lane.reduction import divide


class GlooFallback:
    """The gloo group inside a SharedGroup, with what PyTorch expects of a group."""

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
