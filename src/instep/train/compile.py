"""Compile what a step computes, and go on without where that cannot be.

[Note: Compiling]
Of a Task the loss is compiled as a whole, the model in it, so that the compiler fuses the loss with the model's last
layer; of a loop of one's own, its models. Full batches only: an epoch's last one would be compiled for one step, and
the code that fits both is slower for all others. Evaluation is not compiled. The first time that a batch of new shapes
comes, it is a trial: should it fail, all is put back as it was, the same rows are computed again with the same noise,
uncompiled, and so is all that follows. Who asks for --compile gets an error instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from instep.core.errors import CompileError, InstepError
from instep.parallel.noise import NoiseWatch
from instep.train.engine import Engine
from instep.world.tensors import nested_tensors

LossOf = Callable[[nn.Module, Any], Any]
"""Gives the loss of a batch as a Task does: a mean, or a mean and its weight."""
Say = Callable[[str], None]


def is_compiled(model: nn.Module) -> bool:
    """Tell whether the user compiles the model, or a module of it."""
    return any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in model.modules())


def wants_compiling(engine: Engine) -> bool:
    """Tell whether to compile: as was asked for, or else where it is known to pay."""
    spec = engine.spec
    if spec.compile is not None:
        return spec.compile
    if engine.on_cpu or spec.exact or spec.recompute or engine.witness is not None:
        return False
    if engine.context.connected and engine.world.world_size > 1:
        return False  # a trial that fails on one rank would speak once more than the others
    return engine.strategy.name in ("single", "ddp") and not any(is_compiled(t.model) for t in engine.trained)


class Trials:
    """Which shapes have been tried, and what to do when one cannot be compiled."""

    def __init__(self, engine: Engine, say: Say) -> None:
        self._engine = engine
        self._say = say
        self._known: set[tuple[Any, ...]] = set()
        self._failed = False

    def is_due(self) -> bool:
        """Tell whether this part is to be computed by compiled code."""
        return not self._failed and self._engine.is_full and self._engine.context.num_rows > 0

    @property
    def is_first(self) -> bool:
        """Whether there was none yet."""
        return not self._known

    def knows(self, given: Any) -> bool:
        """Tell whether these shapes were tried before."""
        return self._key(given) in self._known

    def passed(self, given: Any) -> None:
        """Note that these shapes can be computed."""
        self._known.add(self._key(given))

    def give_up(self, error: Exception) -> None:
        """Go on without, and say so; or end the run, if compiling was asked for."""
        self._failed = True
        reason = _reason(error)
        if self._engine.spec.compile:
            raise CompileError(
                f"--compile: this model cannot be compiled, though it can be computed. {reason}\n"
                "Leave --compile away, or see what torch.compile says of it with TORCH_LOGS=+dynamo."
            ) from error
        self._say(f"not compiled, since that failed: {reason}. The training goes on without, which may be slower.")

    @property
    def cannot_repeat(self) -> bool:
        """Whether layers exchange something: then no rank can go through a part once more by itself."""
        return self._engine.context.connected and self._engine.world.world_size > 1

    def refusal(self, error: Exception) -> CompileError:
        """Say that compiled code failed, where nothing can be computed once more without it."""
        return CompileError(
            f"--compile: compiled code failed. {_reason(error)}\nIts layers exchange something, so that it cannot be "
            "tried again without. Leave --compile away, to see whether the model itself can be computed."
        )

    def _key(self, given: Any) -> tuple[Any, ...]:
        return tuple((tensor.shape, tensor.dtype) for tensor in nested_tensors(given))


def _reason(error: Exception) -> str:
    cause = getattr(error, "inner_exception", error)  # what a compiler said is wrapped up by dynamo
    return ": ".join([type(cause).__name__, *str(cause).strip().splitlines()[:1]])


class CompiledLoss:
    """A Task's loss, and in `compiled` the same, compiled together with its model."""

    def __init__(self, engine: Engine, loss_of: LossOf, say: Say) -> None:
        self._loss_of = loss_of
        self._say = say
        self.trials = Trials(engine, say)
        self._compiled: LossOf | None = None

    def compiled(self, model: nn.Module, batch: Any) -> Any:
        """Compute the same in compiled code."""
        if self._compiled is None:  # now and not before: this, too, may fail
            self._compiled = torch.compile(self._loss_of)
        return self._compiled(model, batch)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self._loss_of(model, batch)

    def look_for_noise(self, model: nn.Module, batch: Any) -> None:
        """Go forward once, uncompiled, and tell of noise that instep does not own: compiled, it could not be seen."""
        watch = NoiseWatch()
        with watch, torch.no_grad():
            self(model, batch)
        torch.clear_autocast_cache()  # weights that were cast without a gradient have none
        for text in watch.notices():
            self._say(text)


def compile_model(model: nn.Module, engine: Engine, say: Say) -> None:
    """Compile a model for a loop of one's own, which calls it as before."""
    trials = Trials(engine, say)

    def plain(*positional: Any, **named: Any) -> Any:
        return model._call_impl(*positional, **named)

    @functools.cache
    def made() -> Callable[..., Any]:
        return torch.compile(plain)  # a function of ours: torch's own code would be compiled piece by piece

    def call(*positional: Any, **named: Any) -> Any:
        given = (positional, named)
        if not trials.is_due():
            return plain(*positional, **named)
        if trials.knows(given):
            return made()(*positional, **named)
        before = Before(engine)
        try:
            found = made()(*positional, **named)
        except InstepError:
            raise
        except Exception as error:
            if trials.cannot_repeat:
                raise trials.refusal(error) from error
            before.put_back()
            found = plain(*positional, **named)  # what is wrong with the model itself is raised here
            trials.give_up(error)
        trials.passed(given)
        return found

    model._compiled_call_impl = call


class Before:
    """What a trial may change besides gradients: buffers, and how often layers have drawn noise."""

    def __init__(self, engine: Engine) -> None:
        self._uses = [(layer, layer.uses) for layer in engine.context.noisy]
        self._buffers = [(b, b.detach().clone()) for trained in engine.trained for b in trained.model.buffers()]

    def put_back(self) -> None:
        """Let it be as it was."""
        for layer, uses in self._uses:
            layer.uses = uses
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
