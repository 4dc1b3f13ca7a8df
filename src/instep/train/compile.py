"""Compile what a step computes; where that fails, train uncompiled.

[Note: Compiling]
For a Task the loss is compiled as a whole, the model in it, so that the compiler fuses the loss with the model's last
layer; for a loop of one's own, its models are. Only full batches are compiled: an epoch's last one would be compiled
for one step, and the code that fits both is slower for all others. Evaluation is not compiled. The first batch of each
new shape is a trial: if it fails, everything is restored, the same rows are computed again with the same noise,
uncompiled, and so is all that follows. A user who asks for --compile gets an error instead.

Where a model is distributed, its blocks are compiled instead, by the strategy ([Note: Regional compilation]).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from instep.core.errors import CompileError, InstepError
from instep.parallel.noise import NoiseWatch
from instep.parallel.noise_patches import torchs_own_functions
from instep.parallel.preserve import SavedBuffers
from instep.parallel.regional import reason_of
from instep.parallel.strategy import LossOf
from instep.train.engine import Engine
from instep.world.tensors import nested_tensors


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
    """Runs compiled code for the shapes that it is known to work for, and tries new ones."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.known: set[tuple[Any, ...]] = set()
        """The shapes that have been tried."""
        self._failed = False

    def run(
        self,
        given: Any,
        compiled: Callable[[], Any],
        plain: Callable[[], Any],
        begin_trial: Callable[[], Callable[[], None]],
    ) -> Any:
        """Return what compiled code computes, or, where that fails or is not to be, what `plain` does.

        `begin_trial` notes what a trial may change, and returns a function that restores it. Where layers exchange
        something, no rank can go through a part once more by itself.
        """
        engine = self._engine
        if self._failed or not engine.is_full or not engine.context.num_rows:
            return plain()
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in nested_tensors(given))
        if shapes in self.known:
            return compiled()
        restore = begin_trial()
        try:
            result = compiled()
        except InstepError:
            raise
        except Exception as error:
            if engine.context.connected and engine.world.world_size > 1:
                raise CompileError(
                    f"--compile: compiled code failed. {reason_of(error)}\nIts layers exchange something, so that it "
                    "cannot be tried again without. Leave --compile out, to see whether the model itself can be "
                    "computed."
                ) from error
            restore()
            result = plain()  # an error of the model itself is raised here
            self._give_up(error)
        self.known.add(shapes)
        return result

    def _give_up(self, error: Exception) -> None:
        """Train uncompiled from now on, with a notice; or end the run, if compiling was asked for."""
        self._failed = True
        reason = reason_of(error)
        if self._engine.spec.compile:
            raise CompileError(
                f"--compile: this model cannot be compiled, though it can be computed. {reason}\n"
                "Leave --compile out, or see what torch.compile says of it with TORCH_LOGS=+dynamo."
            ) from error
        self._engine.notice(
            f"not compiled, since that failed: {reason}. The training continues without, which may be slower."
        )


def note_state(engine: Engine) -> Callable[[], None]:
    """Note what a trial may change besides gradients: buffers, and how often layers have drawn noise.

    Return a function that restores it.
    """
    uses = [(layer, layer.uses) for layer in engine.context.noisy]
    buffers = SavedBuffers(trained.model for trained in engine.trained)

    def restore() -> None:
        for layer, count in uses:
            layer.uses = count
        buffers.restore()

    return restore


class CompiledLoss:
    """A Task's loss, and in `compiled` the same, compiled together with its model."""

    def __init__(self, engine: Engine, loss_of: LossOf) -> None:
        self._engine = engine
        self._loss_of = loss_of
        self.trials = Trials(engine)

    @functools.cached_property
    def compiled(self) -> LossOf:
        """The loss in compiled code; made in the first trial: this, too, may fail."""
        return torch.compile(self._loss_of)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self._loss_of(model, batch)


def look_for_noise(engine: Engine, model: nn.Module, loss_of: LossOf, batch: Any) -> None:
    """Run forward once, uncompiled, and report noise that instep does not own: compiled, it cannot be seen.

    Called on all ranks where layers communicate.
    """
    restore, watch = note_state(engine), NoiseWatch()
    with engine.context.uncompiled(), torchs_own_functions(torch.Tensor), watch, torch.no_grad():
        loss_of(model, batch)
    torch.clear_autocast_cache()  # weights that were cast without a gradient have none
    restore()
    for text in watch.notices():
        engine.notice(text)


def compile_models(engine: Engine) -> None:
    """Compile all models in training: by blocks where the strategy asks for that, else each as a whole."""
    for trained in engine.trained:
        if engine.strategy.compiles_blocks:
            trained.compile_blocks()
        else:
            compile_model(trained.model, engine)


def compile_model(model: nn.Module, engine: Engine) -> None:
    """Compile a model for a loop of one's own, which calls it as before."""
    trials = Trials(engine)

    def plain(*positional: Any, **named: Any) -> Any:
        return model._call_impl(*positional, **named)

    @functools.cache
    def made() -> Callable[..., Any]:
        return torch.compile(plain)  # a function of ours: torch's own code would be compiled piece by piece

    def call(*positional: Any, **named: Any) -> Any:
        return trials.run(
            (positional, named),
            lambda: made()(*positional, **named),
            lambda: plain(*positional, **named),
            lambda: note_state(engine),
        )

    model._compiled_call_impl = call
