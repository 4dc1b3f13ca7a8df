"""Change the class of a module that exists: its names, state, hooks and the user's methods stay."""

from typing import Any

from torch import nn

_classes: dict[tuple[type, type, bool], type] = {}


def add_base(module: nn.Module, mixin: type[nn.Module], before: bool = True, **attributes: Any) -> None:
    """Make a module an instance of its own class and of `mixin`, in place, and set the attributes that `mixin` needs.

    `before`: whose methods come first.
    """
    kind = type(module)
    key = (kind, mixin, before)
    if key not in _classes:
        bases = (mixin, kind) if before else (kind, mixin)
        _classes[key] = type(f"{mixin.__name__.strip('_')}{kind.__name__}", bases, {})
    module.__class__ = _classes[key]
    for name, value in attributes.items():
        setattr(module, name, value)
