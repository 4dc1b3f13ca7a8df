"""Run a model on the side, and leave it as it was."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class SavedBuffers:
    """The buffers of models, as they are now."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._saved = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the buffers that have changed since, in the same memory."""
        for module, name, buffer, value in self._saved:
            if buffer is None or value is None:
                module._buffers[name] = None
                continue
            is_same = module._buffers[name] is buffer and not isinstance(buffer, DTensor) and torch.equal(buffer, value)
            if not is_same:
                module._buffers[name] = buffer
                buffer.copy_(value)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[SavedBuffers]:
    """Put a model into evaluation mode, and restore its modules' modes and its buffers at the end.

    Yields the buffers, for callers that restore them more often.
    """
    modes = [(module, module.training) for module in model.modules()]  # some may be frozen in evaluation mode
    buffers = SavedBuffers([model])
    model.eval()
    try:
        yield buffers
        buffers.restore()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # a device that failed restores nothing
            buffers.restore()
        raise
    finally:
        for module, training in modes:
            module.training = training
