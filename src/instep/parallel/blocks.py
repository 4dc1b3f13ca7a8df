"""The repeated blocks of a model, found from its modules.

A deep model is one block again and again. The block is what is worth sharding, and what is worth computing twice to
save its activations: large enough to be worth the trouble, small enough that only a part of the model is there at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from instep.core.errors import TaskError

Blocks = Callable[[nn.Module], Iterable[nn.Module]]
"""Names the blocks of a model, where somebody knows better."""
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def blocks_of(model: nn.Module, given: Blocks | None) -> list[tuple[str, nn.Module]]:
    """Give the blocks of a model with their names: those that were named, or those that are found."""
    if given is None:
        return find_blocks(model)
    names = {id(module): name for name, module in model.named_modules() if name}
    found = []
    for number, block in enumerate(given(model)):
        if id(block) not in names:
            raise TaskError(
                f"blocks(model) gave a {type(block).__name__} at position {number} that is no module inside of the "
                "model. Give modules of it, model.layers for instance."
            )
        found.append((names[id(block)], block))
    return found


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the repeated blocks, with their names, in the model's order; empty: nothing is repeated.

    Blocks stand beside others of their class in a ModuleList or a Sequential; where there are none, they are the
    modules of the one class, repeated anywhere, that holds most parameters. Modules made of others come before single
    layers, outer ones before those inside them. What has no parameters does not count.
    """
    modules = {name: module for name, module in model.named_modules() if name and _num_parameters(module)}
    composed = {name: module for name, module in modules.items() if any(True for _ in module.children())}
    layers = {name: module for name, module in modules.items() if name not in composed}
    beside = _outermost(_beside_others(model, composed.values()), composed)
    return beside or _largest(composed) or _largest(layers)


def _beside_others(model: nn.Module, candidates: Iterable[nn.Module]) -> set[int]:
    """Find those that have others of their class beside them in a list; the ids of the modules."""
    wanted, found = {id(module) for module in candidates}, set()
    for holder in model.modules():
        if isinstance(holder, _LISTS):
            by_class: dict[type, set[int]] = {}
            for child in holder.children():
                if id(child) in wanted:
                    by_class.setdefault(type(child), set()).add(id(child))
            found |= {each for ids in by_class.values() if len(ids) > 1 for each in ids}
    # Lists of lists: a stage that is nothing but a list of blocks is not a block itself.
    stages = {
        id(holder)
        for holder in model.modules()
        if type(holder) in _LISTS and any(id(child) in found for child in holder.children())
    }
    return found - stages


def _largest(modules: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Take the class that is there more than once and holds most parameters, unless it only holds others."""
    by_class: dict[type, list[tuple[str, nn.Module]]] = {}
    for name, module in modules.items():
        if type(module) not in _LISTS:
            by_class.setdefault(type(module), []).append((name, module))
    repeated = [_outermost({id(m) for _, m in group}, dict(group)) for group in by_class.values()]
    repeated = [group for group in repeated if len(group) > 1]
    return max(repeated, key=lambda group: sum(_num_parameters(m) for _, m in group), default=[])


def _outermost(wanted: set[int], modules: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, module in modules.items():  # outer ones come first
        if id(module) in wanted and not any(name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, module))
    return found


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
