"""Regional compilation: the repeated blocks of a distributed model, each compiled by itself.

[Note: Regional compilation]
Ranks that distribute a model communicate between its blocks: FSDP2 gathers parameters in hooks of a block, a stage of a
pipeline receives and sends. Compiled code must not contain that. So the forward pass of a block is compiled without its
hooks, which run uncompiled around it; names, state and hooks of the block stay. Blocks with parameters of the same
shapes share one function, which dynamo compiles once for all of them: the time to compile does not grow with depth.
What differs between such blocks must reach the function in tensors. A Python number would be a guard, and each block
would be compiled anew (keys of noise: `RowDropout.hold_keys`, `RowNoise.begin_region`).

The Task's loss is a region of its own: the call of the model in the middle of it stays outside. Uncompiled, a loss over
a vocabulary would hold the logits in float32 several times, which is more than sharding saves.

As with a whole loss ([Note: Compiling]), only full batches of a training step are compiled, and a pass without
gradients before the first one looks for noise that instep does not own, and raises the model's own errors as without
compiling. In a pipeline, where no rank can make that pass, and in a loop of one's own, the first step of a process is
not compiled instead. A failure after that is the compiler's, and ends the run: a rank that continued uncompiled alone
would make all others wait for it in every step, and nobody would know.
"""

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from instep.core.errors import CompileError, InstepError
from instep.parallel.batch_context import BatchContext
from instep.parallel.class_change import add_base
from instep.parallel.dropout import RowDropout

_AOT = str(Path(torch.__file__).parent / "_functorch" / "_aot_autograd")
_numbers = itertools.count()


class Region:
    """A function that runs compiled in the parts of full batches, and as it is elsewhere."""

    def __init__(self, function: Callable[..., Any], context: BatchContext) -> None:
        self._function = function
        self._context = context

    def __deepcopy__(self, _memo: object) -> "Region":
        return self  # a copy of a model computes with the same code

    def __call__(self, *positional: Any, **named: Any) -> Any:
        if not self._context.runs_compiled:
            return self._function(*positional, **named)
        with raising_compile_errors(), self._context.region():
            return self._compiled(*positional, **named)

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        function = self._function

        def run(*positional: Any, **named: Any) -> Any:
            return function(*positional, **named)

        # dynamo keeps compiled code, and the sizes that it takes for variable, by code object and by name.
        name = f"region_{next(_numbers)}"
        code = run.__code__.replace(co_name=name, co_qualname=name)
        return torch.compile(types.FunctionType(code, run.__globals__, name, None, run.__closure__))


class _CompiledBlock(nn.Module):
    """Comes before a block's class, and runs its forward pass as a region."""

    _region: Region

    def forward(self, *positional: Any, **named: Any) -> Any:
        return self._region(self, *positional, **named)


class _Opaque:
    """A model as a compiled loss sees it: called outside of the region; its attributes are the model's."""

    def __init__(self, model: Callable[..., Any], context: BatchContext) -> None:
        self._model = model
        self._context = context

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *positional: Any, **named: Any) -> Any:
        with self._context.outside_region():
            return self._model(*positional, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class RegionalLoss:
    """A loss whose own code runs as a region, and whose model is called outside of it."""

    def __init__(self, loss_of: Callable[[Any, Any], Any], context: BatchContext) -> None:
        self._loss_of = loss_of
        self._region = Region(loss_of, context)
        self._context = context

    def __call__(self, model: Callable[..., Any], batch: Any) -> Any:
        if not self._context.runs_compiled:
            return self._loss_of(model, batch)
        return self._region(_Opaque(model, self._context), batch)


def compile_blocks(blocks: Sequence[nn.Module], context: BatchContext) -> None:
    """Make blocks run compiled, in place."""
    regions: dict[Hashable, Region] = {}
    for block in blocks:
        kind = type(block)
        tensors = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters())
        region = regions.setdefault((kind, tensors), Region(kind.forward, context))
        hold_keys(block)
        add_base(block, _CompiledBlock, _region=region)


def hold_keys(module: nn.Module) -> None:
    """Make all dropouts of a module read their keys from tensors in compiled code."""
    for layer in module.modules():
        if isinstance(layer, RowDropout):
            layer.hold_keys()


@contextlib.contextmanager
def raising_compile_errors() -> Iterator[None]:
    """Raise CompileError for a failure of the compiler, or of what it made."""
    try:
        yield
    except InstepError:
        raise
    except Exception as error:
        # A stage of a pipeline wraps what its backward pass raises.
        cause = next((e for e in (error, error.__cause__) if e is not None and _is_compilers(e)), None)
        if cause is None:
            raise
        raise CompileError(
            f"--compile: compiled code failed. {reason_of(cause)}\nThe model is distributed, so that this rank cannot "
            "continue uncompiled by itself. Leave --compile out, or see what torch.compile says of it with "
            "TORCH_LOGS=+dynamo."
        ) from error


def _is_compilers(error: BaseException) -> bool:
    """Return whether an error comes from dynamo, or from a compiled forward or backward pass."""
    if isinstance(error, TorchDynamoException):
        return True
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_AOT):
            return True
        trace = trace.tb_next
    return False


def reason_of(error: BaseException) -> str:
    """Return the first line of what a compiler says."""
    cause = getattr(error, "inner_exception", error)  # dynamo wraps the compiler's own error
    return ": ".join([type(cause).__name__, *str(cause).strip().splitlines()[:1]])
