"""Write down the inputs of replicated and sharded models, and whether ranks may differ in their number.

Ranks: all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel

from instep.check.observe.attempt import attempt
from instep.check.observe.observer import Observer
from instep.check.observe.rows import hash_tensors, num_rows_of
from instep.check.records.replicas import Joined, ReplicaForward


class ReplicaObserver(Observer):
    """Watches DistributedDataParallel, FSDP2 and Join."""

    def install(self) -> None:
        """Put the hooks in place."""
        self.wrap(DistributedDataParallel, "forward", self._ddp_forward)
        self.wrap(FSDPState, "_root_pre_forward", self._fsdp_forward)
        self.wrap(Join, "__enter__", self._joined)

    def _ddp_forward(self, original: Any, model: DistributedDataParallel, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._write("ddp", torch.distributed.get_world_size(model.process_group), (args, kwargs))
        return original(model, *args, **kwargs)

    def _fsdp_forward(self, original: Any, state: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and state._state_ctx.iter_forward_root is None:
            self._write("fsdp", torch.distributed.get_world_size(), (args, kwargs))
        return original(state, module, args, kwargs)

    def _write(self, wrapper: str, group_size: int, inputs: Any) -> None:
        with self.log.unobserved():
            input_hash = attempt(lambda: hash_tensors(inputs)) or 0
        self.log.write(
            ReplicaForward,
            wrapper=wrapper,
            group_size=group_size,
            input_hash=input_hash,
            num_rows=num_rows_of(inputs),
            has_grad=torch.is_grad_enabled(),
        )

    def _joined(self, original: Any, join: Join) -> Any:
        self.log.write(Joined)
        return original(join)
