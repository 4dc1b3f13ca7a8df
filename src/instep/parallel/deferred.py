"""Build a model on the meta device, and compute the same initial values later, one tensor at a time.

[Note: Deferred models]
A model that will be sharded need not fit into the memory of one rank. It is built on the meta device, where tensors
have shapes and no values, and the operations of its constructor on them (draw, fill, copy, multiply) are recorded.
Later the same operations run on the CPU in the same order, from the same state of the generator, so every value is the
one that building the model as usual would have given. A tensor is delivered after its last operation, and freed. Values
that would be overwritten (a constructor's own, before `apply(init)`) are drawn, since later draws depend on the state
of the generator, and dropped at once.

The functions of torch.nn.init are recorded as single operations: some read the values that they have drawn, and do
nothing to a tensor without values. They are replaced in every module that imported them.

What cannot be recorded (values that the constructor reads, noise on tensors that it puts on the CPU) raises TaskError.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from instep.core.errors import TaskError
from instep.world.tensors import nested_tensors

_META, _CPU = torch.device("meta"), torch.device("cpu")
_OVERWRITES = {"uniform_", "normal_", "fill_", "zero_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_"}
Deliver = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes a tensor of the deferred model and its values, which are freed when it returns."""


@dataclass(frozen=True)
class _Call:
    """One operation of the constructor."""

    function: Any
    positional: tuple[Any, ...]
    named: dict[str, Any]
    made: dict[int, int]
    """The storages that it made, and the position of each in its results."""
    used: tuple[int, ...]
    """The storages that it read or wrote."""
    overwrites: int | None
    """The storage that it overwrites completely."""

    @property
    def only_allocates(self) -> bool:
        """Whether its results have no values yet."""
        return isinstance(self.function, OpOverload) and self.function.overloadpacket.__name__.startswith("empty")


@dataclass
class Deferred:
    """A model on the meta device, and the operations that compute its values."""

    model: nn.Module
    _recorder: _Recorder
    _generator: torch.Tensor

    def materialize(self, wanted: list[torch.Tensor], deliver: Deliver) -> None:
        """Compute the values of `wanted` tensors of the model, one after the other, on the CPU."""
        torch.set_rng_state(self._generator)
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in wanted:
            by_storage.setdefault(_storage(tensor), []).append(tensor)
        calls = self._recorder.calls
        last = {storage: i for i, call in enumerate(calls) for storage in (*call.used, *call.made)}
        begins = {call.overwrites: i for i, call in enumerate(calls) if call.overwrites is not None}
        # Read, or changed in part, before it is overwritten for the last time: needed from the beginning.
        needed = {s for i, c in enumerate(calls) for s in c.used if i < begins.get(s, 0) and c.overwrites != s}
        real: dict[int, torch.Tensor] = {}
        for i, call in enumerate(calls):
            self._run(call, real, lambda s, i=i: s in needed or i >= begins.get(s, 0))  # type: ignore[misc]
            for storage in {*call.used, *call.made}:
                if last[storage] == i:
                    for tensor in by_storage.pop(storage, ()):
                        deliver(tensor, _as(tensor, real[storage]))
                    real.pop(storage, None)
        if by_storage:
            raise _refusal(f"{len(by_storage)} of its tensors were not made by its constructor")

    def _run(self, call: _Call, real: dict[int, torch.Tensor], is_kept: Callable[[int], bool]) -> None:
        """Run one operation, unless its result will be overwritten; random numbers are drawn in any case."""
        target = call.overwrites
        if target is not None and not is_kept(target):
            if _draws(call.function):
                self._call(call, {**real, target: _empty_for(call.positional[0])})
            return
        if call.only_allocates and not all(map(is_kept, call.made)):  # allocated when it is overwritten
            return
        if target is not None and target not in real:
            real[target] = _empty_for(call.positional[0])
        results = list(nested_tensors(self._call(call, real)))
        for storage, place in call.made.items():
            real[storage] = results[place]

    def _call(self, call: _Call, real: dict[int, torch.Tensor]) -> Any:
        def to_real(tensor: torch.Tensor) -> torch.Tensor:
            return _as(tensor, real[_storage(tensor)]) if tensor.is_meta else tensor

        positional, named = tree_map_only(torch.Tensor, to_real, (call.positional, call.named))
        if named.get("device") == _META:
            named = {**named, "device": _CPU}
        with torch.no_grad():
            return call.function(*positional, **named)


class _Recorder(TorchDispatchMode):
    """Records the operations on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.keep: list[torch.Tensor] = []
        """All tensors that were made: a storage that is freed could give its number to another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        given = list(nested_tensors((args, kwargs)))
        out = func(*args, **kwargs)
        results = list(nested_tensors(out))
        if not any(t.is_meta for t in (*given, *results)):
            if _draws(func):
                raise _refusal(f"{func} draws on the CPU, out of order")
            return out
        if kwargs.get("generator") is not None:
            raise _refusal(f"{func} draws from its own generator")
        args, kwargs = tree_map_only(torch.Tensor, _as_it_is_now, (args, kwargs))
        self.keep += [_as_it_is_now(t) for t in (*given, *results) if t.is_meta]
        used = tuple(_storage(t) for t in given if t.is_meta)
        made = {s: place for place, t in enumerate(results) if t.is_meta and (s := _storage(t)) not in used}
        # A view makes and changes nothing: its values are found by its storage.
        if made or func._schema.is_mutable:
            overwrites = _overwritten(args[0]) if func.overloadpacket.__name__ in _OVERWRITES else None
            self.calls.append(_Call(func, args, kwargs, made, used, overwrites))
        return out


def build_deferred(build: Callable[[], nn.Module]) -> Deferred:
    """Build a model on the meta device, and record how."""
    state = torch.get_rng_state()
    recorder = _Recorder()
    try:
        with _META, recorder, _initialisers_recorded(recorder):
            model = build()
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise _refusal(f"{type(error).__name__}: {error}") from error
    finally:
        torch.set_rng_state(state)
    return Deferred(model, recorder, state)


@contextlib.contextmanager
def _initialisers_recorded(recorder: _Recorder) -> Iterator[None]:
    """Record calls of torch.nn.init's functions as single operations."""

    def recorded(function: Any) -> Any:
        @functools.wraps(function)
        def initialise(tensor: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
            if not tensor.is_meta:
                return cast(torch.Tensor, function(tensor, *positional, **named))
            now = _as_it_is_now(tensor)
            recorder.keep.append(now)
            recorder.calls.append(_Call(function, (now, *positional), named, {}, (_storage(now),), _overwritten(now)))
            return tensor

        return initialise

    replacements = {
        function: recorded(function)
        for name, function in vars(nn.init).items()
        if isinstance(function, FunctionType) and function.__module__ == nn.init.__name__ and name.endswith("_")
    }
    changed = []
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is FunctionType and value in replacements:
                changed.append((module, name, value))
                setattr(module, name, replacements[value])
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _draws(function: Any) -> bool:
    return not isinstance(function, OpOverload) or torch.Tag.nondeterministic_seeded in function.tags


def _refusal(why: str) -> TaskError:
    return TaskError(
        f"meta_init builds the model without its values, and this model cannot be built so: {why}. Train without "
        "--meta-init, or let model() only create and initialise modules."
    )


def _overwritten(target: torch.Tensor) -> int | None:
    """Return the storage that writing to all elements of a tensor overwrites completely."""
    is_whole = target.nbytes == target.untyped_storage().nbytes() and target.is_contiguous()
    return _storage(target) if target.is_meta and is_whole else None


def _as_it_is_now(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a tensor's storage: a module's `to` gives the same parameter another one."""
    return tensor.detach() if tensor.is_meta else tensor


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _empty_for(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype, device=_CPU)


def _as(like: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """View a storage's values with the shape and strides of a tensor of the deferred model."""
    return real.as_strided(like.size(), like.stride(), like.storage_offset())
