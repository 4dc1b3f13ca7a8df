"""Activation checkpointing: the repeated blocks of a model are recomputed in the backward pass.

Only the inputs of a block are kept; its activations are computed again in backward. The second pass must repeat the
first: torch restores its generators, and this module restores the counts of uses of noise and the buffers. Afterwards
all have the values that they would have without a second pass.

Ranks: all alike, because a synchronised BatchNorm communicates in the second pass, too.
"""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from instep.parallel.batch_context import BatchContext
from instep.parallel.blocks import Blocks, blocks_of, count_by_class
from instep.parallel.class_change import add_base


class _Recomputed(nn.Module):
    """Comes before a block's class, and recomputes its forward pass in backward."""

    _context: BatchContext
    _changing: set[tuple[str, str]] | None
    """The buffers that a forward pass writes to: module and name; None: not known yet."""

    # If the user compiles the model, dynamo could not trace the second pass.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *positional: Any, **named: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*positional, **named)
        start, context = _StartState(self), self._context

        def run(*arguments: Any, **options: Any) -> Any:
            before, context.restores_uses = context.restores_uses, True
            try:
                return forward(*arguments, **options)
            finally:
                context.restores_uses = before

        output = checkpoint(
            run,
            *positional,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), start),
            **named,
        )
        start.find_changing_buffers()
        return output


class _StartState:
    """The state, besides inputs, in which a block's forward pass began; a context in which that state is restored."""

    def __init__(self, block: _Recomputed) -> None:
        self._block = block
        self._uses = [(layer, layer.uses) for layer in block._context.noisy]
        self._buffers = {
            (place, name): (module, buffer.detach().clone())
            for place, module in block.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and (block._changing is None or (place, name) in block._changing)
        }
        self._undo = contextlib.ExitStack()

    def find_changing_buffers(self) -> None:
        """Find out, after the very first pass, which buffers need a copy: constants may be large."""
        block = self._block
        if block._changing is None:
            block._changing = {
                key
                for key, (module, value) in self._buffers.items()
                if (now := module._buffers[key[1]]) is None or not torch.equal(now, value)
            }
            self._buffers = {key: self._buffers[key] for key in block._changing}

    def __enter__(self) -> None:
        context = self._block._context
        self._undo.callback(setattr, context, "again", context.again)
        context.again = True
        for layer, uses in self._uses:
            self._undo.callback(setattr, layer, "uses", layer.uses)
            layer.uses = uses
        for (_, name), (module, value) in self._buffers.items():
            # Another tensor for the time being: writing to the buffer itself would change its version.
            self._undo.callback(module._buffers.__setitem__, name, module._buffers[name])
            module._buffers[name] = value.clone()

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def recompute_blocks(model: nn.Module, context: BatchContext, given: Blocks | None = None) -> str:
    """Make the repeated blocks of a model recompute, in place; return their names and number, empty if none repeats."""
    blocks = [block for _, block in blocks_of(model, given)]
    names = count_by_class(blocks)
    for block in blocks:
        add_base(block, _Recomputed, _context=context, _changing=None)
    return names
