"""The hierarchical all-reduce: shared memory within each node, gloo between nodes.

Ranks: all of the group, in the same order.

[Note: Hierarchical all-reduce]
The ranks of a node add a chunk up in shared memory ([Note: Ring through shared memory]). Then the ranks with the same
local rank on all nodes all-reduce the share that they completed over gloo (an inter-node group), at the same time as
the other inter-node groups. Then every rank copies all shares from shared memory. Nodes may have different numbers of
ranks: there are as many inter-node groups as the smallest node has ranks, and the ranks beyond only add and copy. Sums
are in the order of the ranks within a node, starting at one of them, and in gloo's fixed order between nodes.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from instep.world.lane.lane import Lane, Steps, area_bytes, chunks_of
from instep.world.lane.reduction import Reduction, accumulation_dtype, divide
from instep.world.lane.rendezvous import NodePlan

_OPS = {Reduction.SUM: dist.ReduceOp.SUM, Reduction.MAX: dist.ReduceOp.MAX, Reduction.MIN: dist.ReduceOp.MIN}


class InterNodeGroup:
    """The ranks with one local rank on all nodes, over gloo."""

    def __init__(self, store: dist.Store, node: int, local_rank: int, num_nodes: int, timeout: timedelta) -> None:
        store = dist.PrefixStore(f"inter_node/{local_rank}", store)
        self._gloo = dist.ProcessGroupGloo(store, node, num_nodes, timeout)

    def all_reduce(self, share: torch.Tensor, how: Reduction) -> None:
        """Combine the nodes' shares, in place. Called on all ranks of the inter-node group."""
        if share.numel():
            options = dist.AllreduceOptions()
            options.reduceOp = _OPS[how]
            self._gloo.allreduce([share], options).wait()

    def broadcast(self, flat: torch.Tensor, node: int) -> None:
        """Overwrite the tensor with that of the rank on a node. Called on all ranks of the inter-node group."""
        if flat.numel():
            options = dist.BroadcastOptions()
            options.rootRank = node
            self._gloo.broadcast([flat], options).wait()


class Hierarchical:
    """Collectives over several nodes, seen from one rank."""

    def __init__(self, lane: Lane | None, plan: NodePlan, rank: int, store: dist.Store, timeout: timedelta) -> None:
        """`lane` is None where the rank is alone on its node."""
        self._lane = lane
        self._node, local_rank = plan.where(rank)
        self._num_groups = plan.num_inter_node_groups
        self._group: InterNodeGroup | None = None
        if local_rank < self._num_groups:
            self._group = InterNodeGroup(store, self._node, local_rank, len(plan.nodes), timeout)
        self._num_ranks = sum(map(len, plan.nodes))
        # The same on all nodes: nodes of different sizes have different slots, and gloo aborts on unequal pieces.
        self._chunk_bytes = min(area_bytes(len(ranks)) for ranks in plan.nodes)

    def all_reduce(self, flat: torch.Tensor, how: Reduction) -> Steps:
        """Combine the tensors of all ranks of all nodes, in place. Called on all ranks."""
        group = self._group
        within = Reduction.SUM if how is Reduction.MEAN else how

        def reduce_share(share: torch.Tensor) -> None:
            assert group is not None  # as many shares as groups, and the ranks that complete one have a group
            group.all_reduce(share, within)
            if how is Reduction.MEAN:
                divide(share, self._num_ranks)

        if self._lane is not None:
            yield from self._lane.ring_all_reduce(flat, within, self._num_groups, reduce_share, self._chunk_bytes)
            return
        dtype = accumulation_dtype(flat.dtype)  # as the other nodes' ranks have it
        for piece in chunks_of(flat, self._chunk_bytes):
            share = piece.to(dtype)
            reduce_share(share)
            piece.copy_(share)

    def broadcast(self, flat: torch.Tensor, node: int, local_rank: int) -> Steps:
        """Overwrite the tensor with that of a local rank of a node. Called on all ranks."""
        if self._lane is not None and node == self._node:
            yield from self._lane.broadcast(flat, local_rank)
        if self._group is not None and (self._lane is None or self._lane.local_rank == 0):
            self._group.broadcast(flat, node)
        if self._lane is not None and node != self._node:
            yield from self._lane.broadcast(flat, 0)

    def barrier(self) -> Steps:
        """Wait until every rank of every node is here. Called on all ranks."""
        yield from self.all_reduce(torch.zeros(1), Reduction.SUM)
