"""The repeated blocks of a model, found from its modules.

A deep model repeats one block. The block is the unit of sharding and of activation checkpointing: large enough to be
worth a collective or a second pass, small enough that only a fraction of the model is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from instep.core.errors import TaskError

Blocks = Callable[[nn.Module], Iterable[nn.Module]]
"""Returns the blocks of a model, where the Task names them."""
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def blocks_of(model: nn.Module, given: Blocks | None) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model with their names: those that the Task names, or those that repeat."""
    if given is None:
        return find_blocks(model)
    names = {id(module): name for name, module in model.named_modules() if name}
    blocks = []
    for number, block in enumerate(given(model)):
        if id(block) not in names:
            raise TaskError(
                f"blocks(model) returned a {type(block).__name__} at position {number} that is no module inside the "
                "model. Return modules of the model, for instance model.layers."
            )
        blocks.append((names[id(block)], block))
    return blocks


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks with their names, in the model's order; empty if nothing repeats.

    Blocks are neighbours of one class in a ModuleList, Sequential or ModuleDict. Without such neighbours, they are all
    modules of the repeated class that holds most parameters. Outer modules are preferred to inner ones. Single layers
    do not count: their weights are often used from outside (two embeddings, one of which is the head). Nor do modules
    without parameters.
    """
    modules = {n: m for n, m in model.named_modules() if n and list(m.children()) and _num_parameters(m)}
    return _outermost(_beside_others(model, modules.values()), modules) or _largest(modules)


def _beside_others(model: nn.Module, candidates: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the candidates that have neighbours of their class in a list."""
    wanted, repeated = {id(module) for module in candidates}, set()
    for holder in model.modules():
        if isinstance(holder, _LISTS):
            by_class: dict[type, set[int]] = {}
            for child in holder.children():
                if id(child) in wanted:
                    by_class.setdefault(type(child), set()).add(id(child))
            repeated |= {number for ids in by_class.values() if len(ids) > 1 for number in ids}
    # Lists of lists: a list of blocks is not a block itself.
    stages = {
        id(holder)
        for holder in model.modules()
        if type(holder) in _LISTS and any(id(child) in repeated for child in holder.children())
    }
    return repeated - stages


def _largest(modules: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules of the repeated class that holds most parameters; containers do not count."""
    by_class: dict[type, list[tuple[str, nn.Module]]] = {}
    for name, module in modules.items():
        if type(module) not in _LISTS:
            by_class.setdefault(type(module), []).append((name, module))
    repeated = [_outermost({id(m) for _, m in group}, dict(group)) for group in by_class.values()]
    repeated = [group for group in repeated if len(group) > 1]
    return max(repeated, key=lambda group: sum(_num_parameters(m) for _, m in group), default=[])


def _outermost(wanted: set[int], modules: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    outermost: list[tuple[str, nn.Module]] = []
    for name, module in modules.items():  # outer modules come first
        if id(module) in wanted and not any(name.startswith(f"{outer}.") for outer, _ in outermost):
            outermost.append((name, module))
    return outermost


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
