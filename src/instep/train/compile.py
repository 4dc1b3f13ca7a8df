"""Compile what a step computes; where that fails, train uncompiled.

[Note: Compiling]
For a Task the loss is compiled as a whole, the model in it, so that the compiler fuses the loss with the model's last
layer; for a loop of one's own, its models are. Only full batches are compiled: an epoch's last one would be compiled
for one step, and the code that fits both is slower for all others. Evaluation is not compiled. The first batch of each
new shape is a trial: if it fails, everything is restored, the same rows are computed again with the same noise,
uncompiled, and so is all that follows. A user who asks for --compile gets an error instead.
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
from instep.parallel.preserve import SavedBuffers
from instep.parallel.strategy import LossOf
from instep.train.engine import Engine
from instep.world.tensors import nested_tensors

Notice = Callable[[str], None]


def is_compiled(model: nn.Module) -> bool:
    """Return whether the user compiles the model, or a module of it."""
    return any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in model.modules())


def wants_compiling(engine: Engine) -> bool:
    """Return whether to compile: as the user asks, or else where it is known to pay."""
    spec = engine.spec
    if spec.compile is not None:
        return spec.compile
    if engine.on_cpu or spec.exact or spec.recompute or engine.witness is not None:
        return False
    if engine.context.connected and engine.world.world_size > 1:
        return False  # a trial that fails on one rank would communicate once more than the others
    return engine.strategy.compiles_by_default and not any(is_compiled(t.model) for t in engine.trained)


class Trials:
    """Which shapes have been tried, and what to do when one cannot be compiled."""

    def __init__(self, engine: Engine, notice: Notice) -> None:
        self._engine = engine
        self._notice = notice
        self._known: set[tuple[Any, ...]] = set()
        self._failed = False

    def is_due(self) -> bool:
        """Return whether this part is to be computed by compiled code."""
        return not self._failed and self._engine.is_full and self._engine.context.num_rows > 0

    @property
    def is_first(self) -> bool:
        """Whether there was no trial yet."""
        return not self._known

    def knows(self, given: Any) -> bool:
        """Return whether these shapes were tried before."""
        return self._key(given) in self._known

    def run(self, given: Any, compiled: Callable[[], Any], plain: Callable[[], Any]) -> Any:
        """Return what compiled code computes for new shapes, or, if it fails, what `plain` does.

        `plain` restores what the trial has changed, then computes. Where layers exchange something, no rank can go
        through a part once more by itself.
        """
        try:
            result = compiled()
        except InstepError:
            raise
        except Exception as error:
            if self._engine.context.connected and self._engine.world.world_size > 1:
                raise CompileError(
                    f"--compile: compiled code failed. {_reason(error)}\nIts layers exchange something, so that it "
                    "cannot be tried again without. Leave --compile out, to see whether the model itself can be "
                    "computed."
                ) from error
            result = plain()  # an error of the model itself is raised here
            self._give_up(error)
        self._known.add(self._key(given))
        return result

    def _give_up(self, error: Exception) -> None:
        """Train uncompiled from now on, with a notice; or end the run, if compiling was asked for."""
        self._failed = True
        reason = _reason(error)
        if self._engine.spec.compile:
            raise CompileError(
                f"--compile: this model cannot be compiled, though it can be computed. {reason}\n"
                "Leave --compile out, or see what torch.compile says of it with TORCH_LOGS=+dynamo."
            ) from error
        self._notice(f"not compiled, since that failed: {reason}. The training continues without, which may be slower.")

    def _key(self, given: Any) -> tuple[Any, ...]:
        return tuple((tensor.shape, tensor.dtype) for tensor in nested_tensors(given))


def _reason(error: Exception) -> str:
    cause = getattr(error, "inner_exception", error)  # dynamo wraps the compiler's own error
    return ": ".join([type(cause).__name__, *str(cause).strip().splitlines()[:1]])


class TrialState:
    """What a trial may change besides gradients: buffers, and how often layers have drawn noise."""

    def __init__(self, engine: Engine) -> None:
        self._uses = [(layer, layer.uses) for layer in engine.context.noisy]
        self._buffers = SavedBuffers(trained.model for trained in engine.trained)

    def restore(self) -> None:
        """Put it back."""
        for layer, uses in self._uses:
            layer.uses = uses
        self._buffers.restore()


class CompiledLoss:
    """A Task's loss, and in `compiled` the same, compiled together with its model."""

    def __init__(self, engine: Engine, loss_of: LossOf, notice: Notice) -> None:
        self._loss_of = loss_of
        self._notice = notice
        self.trials = Trials(engine, notice)
        self._compiled: LossOf | None = None

    def compiled(self, model: nn.Module, batch: Any) -> Any:
        """Compute the loss in compiled code."""
        if self._compiled is None:  # now and not before: this, too, may fail
            self._compiled = torch.compile(self._loss_of)
        return self._compiled(model, batch)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self._loss_of(model, batch)

    def look_for_noise(self, model: nn.Module, batch: Any) -> None:
        """Run forward once, uncompiled, and report noise that instep does not own: compiled, it cannot be seen."""
        watch = NoiseWatch()
        with watch, torch.no_grad():
            self(model, batch)
        torch.clear_autocast_cache()  # weights that were cast without a gradient have none
        for text in watch.notices():
            self._notice(text)


def compile_model(model: nn.Module, engine: Engine, notice: Notice) -> None:
    """Compile a model for a loop of one's own, which calls it as before."""
    trials = Trials(engine, notice)

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
        before = TrialState(engine)

        def again() -> Any:
            before.restore()
            return plain(*positional, **named)

        return trials.run(given, lambda: made()(*positional, **named), again)

    model._compiled_call_impl = call
