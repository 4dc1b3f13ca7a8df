"""The world: join the process group, the collectives, leave it.

Ranks: all; each method of World is called on all ranks, in the same order.

A world of one has no process group, and its collectives are free. After a failure no collective is issued: leaving
only tears down, and waits for no other rank.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from instep.core.errors import EnvironmentFailed, PeerLost, SpecError
from instep.core.topology import Place
from instep.world import autoload
from instep.world.device import accelerator_of, check_world_size, device_backends, device_count, device_of
from instep.world.environment import detect
from instep.world.exchange import Channel, Exchange, Reduction
from instep.world.group import SharedGroup
from instep.world.lane.reduction import AddUp, Rows
from instep.world.rendezvous import choose_interface, rendezvous_arguments
from instep.world.slurm import gpus_of_node, judge_allocation
from instep.world.tcp_timeout import TCP_TIMEOUT_S, open_sockets, set_tcp_timeout
from instep.world.waits import WAITS

_EXCHANGE_ELEMENTS = 4 * 2**20
_ORDERED_REDUCE_ELEMENTS = 2**20
"""Elements in flight at once: bounds memory, and received elements are still in the cache when they are added."""
TIMEOUT = datetime.timedelta(minutes=10)


def place_here() -> Place:
    """Return this process's place: from its launcher's variables, with its device."""
    place = detect(os.environ)
    return replace(place, device=device_of(place.local_rank))


def judge_place(place: Place, processes: int = 1, nodes: int = 1) -> tuple[str, ...]:
    """Return, on the main rank, notices about how a scheduler started this process."""
    notices = judge_allocation(os.environ, place, processes, nodes, device_count())
    return notices if place.is_main else ()


def backend_for(place: Place, comm: str = "auto") -> str:
    """Choose the device's own backend when each local rank has a device of its own: it refuses ranks that share one.

    On CPU `comm` chooses between instep's own group, which shares memory where it can, and gloo alone.
    """
    accelerator = accelerator_of(place.device)
    if accelerator is None:
        return "gloo" if comm == "gloo" else autoload.BACKEND
    if comm == "shared-memory":
        raise SpecError(
            f"comm=shared-memory is for processes that train on CPU, and this one trains on {place.device}. "
            "Leave out --comm."
        )
    if place.local_world_size > gpus_of_node(os.environ, accelerator.device_count()):
        return "gloo"
    return accelerator.backend if dist.is_backend_available(accelerator.backend) else "gloo"


class World(contextlib.AbstractContextManager["World"]):
    """The ranks that train together, seen from one of them."""

    def __init__(
        self,
        place: Place,
        backend: str,
        group: dist.ProcessGroup | None = None,
        set_timeouts: Callable[[], object] | None = None,
        is_whole: bool = True,
    ) -> None:
        """`is_whole`: it has all ranks of the job; a part of them may or may not be on several nodes."""
        self.place = place
        self._set_timeouts = set_timeouts
        if set_timeouts is not None:  # the group's connections exist by now
            set_timeouts()
        self._group = group
        """None: a world of one, or the default group."""
        self._lane = group if isinstance(group, SharedGroup) and not group.refusal else None
        self.backend = group.describe() if isinstance(group, SharedGroup) else backend
        """What the ranks communicate over, in words."""
        self.comm_notice = ""
        """What the user should know about that."""
        if isinstance(group, SharedGroup) and group.refusal and place.local_world_size > 1:
            self.comm_notice = f"shared memory is not used: {group.refusal}. gloo is used instead, which takes longer."
        self.rank = place.rank
        self.world_size = place.world_size
        self.is_main = place.is_main
        self.device = torch.device(place.device)
        self.waits = WAITS
        """Counts how long this process has been in collectives so far, most of it waiting for other ranks."""
        self.comm_bytes = 0
        """Passed to collectives by this rank, those of gradients and large tensors."""
        self._spare = torch.empty(0)
        # Launched as several nodes, ranks may still share a machine, and its memory.
        shares_memory = self._lane is not None and self._lane.is_one_node
        spans = is_whole and group is not None and place.spans_nodes and self.device.type == "cpu" and not shares_memory
        self._exchange = Exchange(group) if group is not None and spans and self._lane is None else None
        self.overlaps = spans or (is_whole and backend in device_backends())
        """Whether reductions can go on while this rank computes: those of all ranks over a network."""

    @classmethod
    def join(
        cls,
        place: Place,
        timeout: datetime.timedelta = TIMEOUT,
        comm: str = "auto",
        tcp_timeout_s: float = TCP_TIMEOUT_S,
    ) -> World:
        """Join the process group that this process was launched for; a world of one joins none.

        `tcp_timeout_s` is the timeout of connections to other nodes.
        """
        if (accelerator := accelerator_of(place.device)) is not None:
            accelerator.set_device(torch.device(place.device))
        check_world_size(place.device, place.world_size)
        if place.world_size == 1:
            return cls(place, "none")
        backend = backend_for(place, comm)
        choose_interface(place)
        autoload.register()
        before = open_sockets()
        try:
            dist.init_process_group(
                backend,
                **rendezvous_arguments(place, timeout),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
                device_id=torch.device(place.device) if backend in device_backends() else None,
            )
        except (dist.DistError, OSError, RuntimeError, ValueError) as error:
            raise EnvironmentFailed(
                f"rank {place.rank} could not connect to the other {place.world_size - 1} ranks at "
                f"{place.master_addr}:{place.master_port} ({backend}): {error}. "
                "Check that all of them were started and that this address is reachable."
            ) from error
        group = dist.group.WORLD
        if comm == "shared-memory" and isinstance(group, SharedGroup) and group.refusal:
            dist.destroy_process_group()
            raise EnvironmentFailed(f"comm=shared-memory is not possible: {group.refusal}. --comm auto would use gloo.")
        if not place.spans_nodes or backend in device_backends():
            return cls(place, backend, group)
        return cls(place, backend, group, functools.partial(set_tcp_timeout, tcp_timeout_s, before))

    def within(self, group: dist.ProcessGroup) -> World:
        """Return the world of a group of these ranks."""
        place = replace(self.place, rank=group.rank(), world_size=group.size())
        return World(place, self.backend, group, self._set_timeouts, is_whole=False)

    def __deepcopy__(self, _memo: object) -> World:
        return self  # there is one, also when a module that refers to it is copied

    def __exit__(self, *_: object) -> None:
        """Leave the process group. Issues no collective, so it is safe after a failure."""
        if self.world_size == 1 or not dist.is_initialized():
            return
        # A gloo thread that still holds tensors takes the GIL while the interpreter shuts down, and aborts it: drop
        # what refers to the group first, then the group.
        if self._exchange is not None:
            self._exchange.end()
        self._group = self._lane = self._exchange = None
        gc.collect()
        dist.destroy_process_group()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous tensor over all ranks, in place. Called on all ranks."""
        with WAITS:
            self.comm_bytes += tensor.nbytes
            if self._lane is not None:
                self._lane.all_reduce_now(tensor)
            elif self._exchange is not None:
                self._exchange.all_reduce(tensor.view(-1))
            elif self.world_size == 2 and self.backend == "gloo" and tensor.device.type == "cpu":
                self._all_reduce_pair(tensor)
            elif self.world_size > 1:
                dist.all_reduce(tensor, group=self._group)
        return tensor

    @property
    def has_channels(self) -> bool:
        """Whether `open_channel` opens one."""
        return self._exchange is not None

    def open_channel(self) -> Channel | None:
        """Open a channel for reductions that other collectives may come between. Called on all ranks.

        None: there are none between these ranks; `begin_all_reduce` may be there, whose order counts.
        """
        return None if self._exchange is None else self._exchange.open_channel()

    def begin_all_reduce(self, flat: torch.Tensor) -> dist.Work:
        """Begin to sum a contiguous tensor over all ranks, in place; `wait` ends it. Called on all ranks."""
        self.comm_bytes += flat.nbytes
        work: dist.Work = dist.all_reduce(flat, group=self._group, async_op=True)
        return work

    def wait(self, reduction: Reduction | dist.Work) -> None:
        """Wait until a reduction is done, or, for tensors of a device, until the device will wait for it."""
        with WAITS:
            reduction.wait()

    def can_coalesce(self, dtype: torch.dtype) -> bool:
        """Return whether `all_reduce_coalesced` supports a dtype; the same on all ranks."""
        return self._lane is not None and self._lane.can_coalesce(dtype)

    def all_reduce_coalesced(self, pieces: Sequence[torch.Tensor]) -> None:
        """Sum several contiguous tensors of one dtype over all ranks, in place. Called on all ranks.

        Other ranks may hold the same elements in one flat tensor and call `all_reduce`.
        """
        with WAITS:
            self.comm_bytes += sum([piece.nbytes for piece in pieces])
            assert self._lane is not None
            self._lane.run_now(self._lane.own_lane.all_reduce_coalesced(pieces))

    def _all_reduce_pair(self, tensor: torch.Tensor) -> None:
        """Sum two ranks' tensors: each sends its whole tensor once, where gloo's ring sends two halves in turn.

        On two cores it takes 0.7 of the time of all_reduce (docs/log.md). Both ranks add the same two elements, so both
        hold the same bits.
        """
        for piece in tensor.view(-1).split(_EXCHANGE_ELEMENTS):
            if self._spare.dtype != piece.dtype or self._spare.numel() < piece.numel():
                self._spare = torch.empty_like(piece)
            theirs = self._spare[: piece.numel()]
            self._exchange_pair([piece], [theirs])
            piece.add_(theirs)

    def _exchange_pair(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Send tensors to the other one of two ranks, and receive its tensors."""
        works = [dist.isend(tensor, group=self._group, group_dst=1 - self.rank) for tensor in sent]
        works += [dist.irecv(tensor, group=self._group, group_src=1 - self.rank) for tensor in received]
        for work in works:
            assert work is not None
            work.wait()

    def ordered_reduce(self, own: Rows, counts: Sequence[int], add_up: AddUp, out: torch.Tensor) -> None:
        """All-reduce rows in an order given by the caller; `out` receives the total. Called on all ranks.

        Each rank has `counts[rank]` rows, as long as `out`. `add_up` is called with all of them, in
        the order of the ranks, piece by piece; it may write to them, and returns their total.
        """
        if self.world_size == 1:
            out.copy_(add_up(own))
            return
        self.comm_bytes += len(own) * out.nbytes
        if self._lane is not None and self._lane.can_ordered_reduce(out):
            self._lane.run_now(self._lane.own_lane.ordered_reduce(own, counts, add_up, out))
            return
        for start in range(0, out.numel(), _ORDERED_REDUCE_ELEMENTS):
            pieces = [row[start : start + _ORDERED_REDUCE_ELEMENTS] for row in own]
            piece = out[start : start + _ORDERED_REDUCE_ELEMENTS]
            if self.world_size == 2:
                piece.copy_(add_up(self._rows_of_pair(pieces, counts, piece)))
            else:
                self._ordered_reduce_by_shares(pieces, counts, add_up, piece)

    def _rows_of_pair(self, own: Rows, counts: Sequence[int], like: torch.Tensor) -> Rows:
        """Return both ranks' rows: each sends all of its own."""
        if self.backend != "gloo" or like.device.type != "cpu":
            padded = like.new_zeros(max(counts), like.numel())
            for row, own_row in zip(padded, own, strict=False):
                row.copy_(own_row)
            return [row for rank, rows in enumerate(self.all_gather(padded)) for row in rows[: counts[rank]]]
        theirs = [torch.empty_like(like) for _ in range(counts[1 - self.rank])]
        self._exchange_pair(own, theirs)
        return [*theirs, *own] if self.rank else [*own, *theirs]

    def _ordered_reduce_by_shares(self, own: Rows, counts: Sequence[int], add_up: AddUp, out: torch.Tensor) -> None:
        """Add up one share on each rank, and gather the totals."""
        size = self.world_size
        length = -(-out.numel() // size)
        device = torch.device("cpu") if self.backend == "gloo" else out.device  # gloo lacks it for GPUs
        shares = torch.zeros(size, len(own), length, dtype=out.dtype, device=device)
        for number, row in enumerate(own):
            for share, values in zip(shares[:, number], row.split(length), strict=False):
                share[: values.numel()].copy_(values)
        total = add_up(self.all_to_all(shares.flatten(0, 1), [len(own)] * size, counts).unbind())
        out.copy_(torch.cat(self.all_gather(total))[: out.numel()])

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the ranks' tensors, all of one shape, by rank. Called on all ranks."""
        if self.world_size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with WAITS:
            self.comm_bytes += tensor.nbytes
            dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return parts

    def all_to_all(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send `send[rank]` of the rows to each rank, in order; return those received, by rank. Called on all ranks."""
        with WAITS:
            self.comm_bytes += rows.nbytes
            device = torch.device("cpu") if self.backend == "gloo" else rows.device  # gloo lacks it for GPUs
            own = rows.to(device).contiguous()
            received = own.new_empty(sum(receive), *rows.shape[1:])
            dist.all_to_all_single(received, own, list(receive), list(send), group=self._group)
        return received.to(rows.device)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite the tensors with those of rank `source`. Called on all ranks."""
        filled = [tensor.detach() for tensor in tensors if tensor.numel()]
        if self.world_size == 1 or not filled:
            return
        # As one row of bytes: a call per tensor would cost a round trip each, and gloo does not support all dtypes.
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in filled])
        with WAITS:
            dist.broadcast(flat, group=self._group, group_src=source)
        for tensor, piece in zip(filled, flat.split([tensor.nbytes for tensor in filled]), strict=True):
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))

    def send_recv(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Send one rank's contiguous tensor to another rank's tensor of that shape. Called on these two."""
        staged = tensor.to(self.wire)
        with WAITS:
            if self.rank == source:
                dist.send(staged, group=self._group, group_dst=target)
            elif self.rank == target:
                dist.recv(staged, group=self._group, group_src=source)
        if self.rank == target:
            tensor.copy_(staged)

    @property
    def wire(self) -> torch.device:
        """The device from which tensors can be sent to another rank: gloo sends from the host only."""
        return self.device if self.backend in device_backends() else torch.device("cpu")

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the value of rank `source` on every rank. Sent as JSON, not pickled. Called on all ranks."""
        if self.world_size == 1:
            return value
        is_source = self.rank == source
        text = json.dumps(value).encode() if is_source else b""
        size = torch.tensor([len(text)], device=self.device)
        with WAITS:
            dist.broadcast(size, group=self._group, group_src=source)
        payload = torch.zeros(int(size.item()), dtype=torch.uint8, device=self.device)
        if is_source:
            payload.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        with WAITS:
            dist.broadcast(payload, group=self._group, group_src=source)
        return self._decode(bytes(payload.tolist()), source)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. Sent as JSON. Called on all ranks."""
        if self.world_size == 1:
            return [value]
        text = json.dumps(value).encode()
        sizes = [int(size.item()) for size in self.all_gather(torch.tensor([len(text)], device=self.device))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        texts = [bytes(part[:size].tolist()) for part, size in zip(self.all_gather(padded), sizes, strict=True)]
        return [self._decode(text, rank) for rank, text in enumerate(texts)]

    def _decode(self, text: bytes, rank: int) -> Any:
        """Return what a rank sent as JSON; raise PeerLost if that is something else."""
        try:
            return json.loads(text)
        except ValueError as error:
            raise PeerLost(
                f"rank {rank} sent something else than instep expects here: it called another collective than rank "
                f"{self.rank}. All ranks must call the same collectives in the same order.",
                [rank],
            ) from error

    def barrier(self) -> None:
        """Wait until every rank is here. Called on all ranks."""
        if self.world_size > 1:
            with WAITS:
                dist.barrier(group=self._group)
