"""State that a forward pass changes: found in the first steps, and kept the same on all ranks.

[Note: State that forward changes]
All ranks make the same updates, so parameters stay the same everywhere; buffers that a model writes to in its forward
pass (moving averages, queues, counters) do not, where the values depend on the rows. The first two steps compare every
parameter and buffer before and after their forward passes (in the first one a copy of weights is still equal to them,
and an average of both changes nothing). What changed alike on all ranks (the average of the weights
that a momentum encoder keeps) needs nothing. For a buffer that changed differently, somebody must say how to agree on
it: `Task.sync_buffers()`, or `run.sync_buffers(…)`. Without that, and for parameters, the run is refused, with the
line that wrote it. Buffers that are not saved are caches, and may differ. Numbers and tensors that a module keeps as
plain attributes (a counter, an average) are neither saved nor agreed on, and whether they matter cannot be known: those
that the first step changes are named. BatchNorm's statistics are those of the
global batch in any case, and InstanceNorm's are averaged. In exact mode buffers have rules of their own ([Note: Shard
buffers]), so only parameters are compared.

Ranks: all, alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode

from instep.core.errors import TaskError
from instep.guard.fingerprint import fingerprints
from instep.parallel.noise import calling_line
from instep.world.world import World

_NUM_CHECKED = 2
"""Steps in which changes are looked for."""
RULES = ("mean", "sum", "rank0")
"""The mean over the ranks, each with its share of the rows; all ranks' changes added up; rank 0's value."""


class WriteWatch(TorchDispatchMode):
    """Records the user's line of every operation that writes to a tensor in place. For one step only."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, str] = {}
        """By the address of the memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                if is_written and isinstance(value, torch.Tensor) and (address := _address(value)):
                    self.lines.setdefault(address, calling_line())
        return func(*args, **(kwargs or {}))


@dataclass
class _SyncedBuffer:
    """A buffer that the ranks agree on after each step's forward passes."""

    module: nn.Module
    name: str
    rule: str
    start: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor:
        buffer = self.module._buffers[self.name]
        assert buffer is not None
        return buffer


class ForwardState:
    """The parameters and buffers of all models, seen from one rank."""

    def __init__(
        self,
        world: World,
        exact: bool,
        is_checked: bool = False,
        notice: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """`is_checked`: nothing is refused, because somebody else compares the ranks."""
        self._world, self._exact, self._notice = world, exact, notice
        self._attributes: dict[str, Any] | None = None
        self._rules: dict[str, str] = {}
        self._synced: list[_SyncedBuffer] = []
        self._before: dict[str, int] | None = None
        self._has_begun = False
        self.is_needed = True
        """Whether steps still have to be watched, or buffers agreed on."""
        self._num_to_check = 0 if is_checked or (world.world_size == 1 and not exact) else _NUM_CHECKED
        self.watch = WriteWatch()
        """Active in the first step's forward passes, where nothing is compiled."""

    @property
    def is_checked(self) -> bool:
        """Whether the first steps are over."""
        return not self._num_to_check

    def set_rules(self, rules: Mapping[str, str]) -> None:
        """Say how ranks agree on buffers: patterns of names, each with a rule."""
        for pattern, rule in rules.items():
            if rule not in RULES:
                raise TaskError(f"sync_buffers: {pattern!r} has the rule {rule!r}. The rules are {', '.join(RULES)}.")
        self._rules |= rules

    def begin_step(self, models: Sequence[nn.Module]) -> None:
        """Note what the models hold before the step's forward passes."""
        if not self._has_begun:
            self._has_begun = True
            if self._world.world_size > 1 and not self._exact:
                self._find_synced(models)
            self._attributes = _attributes(models)
        if self._num_to_check:
            self._before = self._prints(models)
        for buffer in self._synced:
            buffer.start = buffer.value.detach().clone() if buffer.rule == "sum" else None

    def end_forward(self, models: Sequence[nn.Module], share: float) -> None:
        """Agree on synced buffers; in the first steps, refuse what else has changed. `share`: of the batch's rows."""
        if self._attributes is not None:
            before_step, self._attributes = self._attributes, None
            after_step = _attributes(models)
            if changed := [name for name, value in before_step.items() if after_step.get(name, value) != value]:
                self._notice(_attribute_notice(changed))
        if self._before is not None:
            before, self._before, self._num_to_check = self._before, None, self._num_to_check - 1
            self._check(before, self._prints(models), {name: (tensor, kind) for name, tensor, kind in _named(models)})
            if self.is_checked:
                self.watch.lines.clear()
        for buffer in self._synced:
            self._agree(buffer, share)
        self.is_needed = bool(self._num_to_check or self._synced)

    def _find_synced(self, models: Sequence[nn.Module]) -> None:
        """Choose the buffers that are agreed on: by the rules, and the averages of InstanceNorm."""
        used = set()
        self._synced = []
        for model in models:
            for prefix, module in model.named_modules():
                for name, buffer in module._buffers.items():
                    path = f"{prefix}.{name}".lstrip(".")
                    pattern = next((pattern for pattern in self._rules if fnmatchcase(path, pattern)), None)
                    used.add(pattern)
                    is_norms = isinstance(module, _InstanceNorm) and name in ("running_mean", "running_var")
                    rule = self._rules[pattern] if pattern is not None else "mean" if is_norms else None
                    if buffer is not None and rule is not None and not isinstance(module, _BatchNorm):
                        self._synced.append(_SyncedBuffer(module, name, rule))
        if unused := [pattern for pattern in self._rules if pattern not in used]:
            known = ", ".join(sorted(name for name, _, kind in _named(models) if kind == "buffer")) or "none"
            raise TaskError(f"sync_buffers: no buffer has the name {unused[0]!r}. The model's buffers are {known}.")

    def _prints(self, models: Sequence[nn.Module]) -> dict[str, int]:
        synced = {id(buffer.value) for buffer in self._synced}
        named = {
            name: tensor
            for name, tensor, kind in _named(models)
            if id(tensor) not in synced and (kind == "parameter" or not self._exact)
        }
        return dict(zip(named, fingerprints(list(named.values())).tolist(), strict=True))

    def _check(self, before: Mapping[str, int], after: Mapping[str, int], tensors: Mapping[str, Any]) -> None:
        changed = {name: after[name] for name in after if after[name] != before.get(name)}
        by_rank = self._world.all_gather_object(changed)
        names = dict.fromkeys(name for prints in by_rank for name in prints)
        differing = [n for n in names if self._exact or len({prints.get(n) for prints in by_rank}) > 1]
        if not differing:
            return
        name = differing[0]
        tensor, kind = tensors.get(name, (None, "buffer"))  # it may be there on other ranks only
        line = self.watch.lines.get(_address(tensor)) if tensor is not None else None
        lines = self._world.all_gather_object(line)  # a rank without such rows has not written it
        line = next(filter(None, lines), None)
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise TaskError(_refusal(name, kind, f"{more}{f', at {line}' if line else ''}", self._exact))

    def _agree(self, buffer: _SyncedBuffer, share: float) -> None:
        value = buffer.value.detach()
        if buffer.rule == "rank0":
            self._world.broadcast([value])
            return
        start = buffer.start if buffer.start is not None else torch.zeros_like(value)
        wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16, torch.float32) else torch.float64
        part = value.to(wide) - start.to(wide) if buffer.rule == "sum" else value.to(wide) * share
        total = self._world.all_reduce(part.contiguous())
        if not value.is_floating_point():
            total = total.round()
        value.copy_(start.to(wide) + total if buffer.rule == "sum" else total)
        if buffer.rule == "sum":
            buffer.start = value.clone()


def _refusal(name: str, kind: str, where: str, exact: bool) -> str:
    if exact:
        return (
            f"the forward pass changes the parameter {name!r}{where}. In exact mode each shard must begin with the "
            "same parameters. Make it a buffer, or change it between two steps."
        )
    text = f"the forward pass changes the {kind} {name!r}{where}, on each rank in another way: they would drift apart."
    if kind == "parameter":
        return (
            f"{text} Change it between two steps, or make it a buffer and say how to agree on it (Task.sync_buffers)."
        )
    return (
        f"{text} Say how to agree on it: a Task's sync_buffers() returns {{{name!r}: 'mean'}}, for instance; 'sum' "
        "adds the ranks' changes up, 'rank0' takes rank 0's. Or train with --exact."
    )


def _attributes(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the numbers that modules of the user's keep as attributes, and which tensors in which version."""
    kept: dict[str, Any] = {}
    for model in models:
        for prefix, module in model.named_modules():
            if type(module).__module__.partition(".")[0] in ("torch", "instep"):
                continue
            for name, value in vars(module).items():
                path = f"{prefix}.{name}".lstrip(".")
                if name.startswith("_") or name == "training":
                    continue
                if isinstance(value, int | float):
                    kept[path] = value
                elif isinstance(value, torch.Tensor) and not value.is_inference():
                    kept[path] = (id(value), value._version)
    return kept


def _attribute_notice(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"the forward pass changes {names[0]!r}{more}, an attribute of the model that is neither a parameter nor a "
        "buffer: it is not saved, and it differs with the number of processes. If the model computes with it, "
        "register it as a buffer."
    )


def _named(models: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield the tensors that forward passes might change, with their names and kinds."""
    for number, model in enumerate(models, start=1):
        suffix = f" (model {number})" if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                yield name + suffix, parameter, "parameter"
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                is_cache = name in module._non_persistent_buffers_set  # a mask for the longest text so far, say
                if buffer is None or is_cache or isinstance(module, _BatchNorm) or isinstance(buffer, DTensor):
                    continue
                yield f"{prefix}.{name}".lstrip(".") + suffix, buffer, "buffer"


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory is; 0 for one without memory of its own (sparse, nested, of a subclass)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
