"""Activation checkpointing: the repeated blocks of a model are computed once more in the backward pass.

Of a block only what it was given is kept; what its layers need for their gradients is computed again when its turn
comes. The second pass must be the first one again: torch brings its own generators back, and here dropout by row
counts its uses as it did then, and buffers hold what they held. Afterwards all are as if there had been no second pass.

Ranks: all of them alike, for a synchronised BatchNorm speaks in the second pass, too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from instep.parallel.batch_context import BatchContext
from instep.parallel.blocks import Blocks, blocks_of
from instep.parallel.dropout import RowDropout


class _Recomputed(nn.Module):
    """Stands before a block's class, and goes through its forward pass again when gradients are asked for."""

    _context: BatchContext
    _restless: set[tuple[str, str]] | None
    """The buffers that a forward pass writes to: module and name; None: not known yet."""

    # Where the user compiles the model: dynamo could not follow the second pass.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *positional: Any, **named: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*positional, **named)
        moment = _Moment(self)
        found = checkpoint(
            forward,
            *positional,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), moment),
            **named,
        )
        moment.learn()
        return found


class _Moment:
    """What a block's forward pass begins with, besides its inputs; entered, it is that moment once more."""

    def __init__(self, block: _Recomputed) -> None:
        self._block = block
        self._uses = [(m, m.uses) for m in block.modules() if isinstance(m, RowDropout)]
        self._buffers = {
            (place, name): (module, buffer.detach().clone())
            for place, module in block.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and (block._restless is None or (place, name) in block._restless)
        }
        self._put_back = contextlib.ExitStack()

    def learn(self) -> None:
        """Find out, after the first pass of all, which buffers are worth a copy: constants may be large."""
        block = self._block
        if block._restless is None:
            block._restless = {
                key
                for key, (module, value) in self._buffers.items()
                if (now := module._buffers[key[1]]) is None or not torch.equal(now, value)
            }
            self._buffers = {key: self._buffers[key] for key in block._restless}

    def __enter__(self) -> None:
        context = self._block._context
        self._put_back.callback(setattr, context, "again", context.again)
        context.again = True
        for layer, uses in self._uses:
            self._put_back.callback(setattr, layer, "uses", layer.uses)
            layer.uses = uses
        for (_, name), (module, value) in self._buffers.items():
            # Another tensor for as long as it takes: writing to the one that is there would leave traces.
            self._put_back.callback(module._buffers.__setitem__, name, module._buffers[name])
            module._buffers[name] = value.clone()

    def __exit__(self, *_: object) -> None:
        self._put_back.close()


_classes: dict[type, type] = {}


def recompute_blocks(model: nn.Module, context: BatchContext, given: Blocks | None = None) -> str:
    """Have the repeated blocks of a model recomputed; name them, with their number, or nothing where there are none.

    The modules stay what they are (names, state, hooks): only their class gets one that stands before it.
    """
    found = blocks_of(model, given)
    blocks = [block for _, block in found if given is not None or any(True for _ in block.children())]
    names = Counter(type(block).__name__ for block in blocks)
    for block in blocks:
        kind = type(block)
        if kind not in _classes:
            _classes[kind] = type(f"Recomputed{kind.__name__}", (_Recomputed, kind), {})
        block.__class__ = _classes[kind]
        own: Any = block
        own._context, own._restless = context, None
    return ", ".join(f"{count} {name}" for name, count in names.items())
