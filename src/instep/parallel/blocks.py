"""The repeated blocks of a model, found from its modules.

A deep model repeats one block. The block is the unit of sharding and of activation checkpointing: large enough to be
worth a collective or a second pass, small enough that only a fraction of the model is in memory at a time.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

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


def count_by_class(blocks: Iterable[nn.Module]) -> str:
    """Return the classes of blocks with the number of each: `12 Block`."""
    return ", ".join(f"{count} {kind.__name__}" for kind, count in Counter(map(type, blocks)).items())


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks with their names, in the model's order; empty if nothing repeats.

    Blocks are neighbours of one class in a ModuleList, Sequential or ModuleDict. Without such neighbours, they are all
    modules of the repeated class that holds most parameters. Outer modules are preferred to inner ones. Single layers
    do not count: their weights are often used from outside (two embeddings, one of which is the head). Nor do modules
    without parameters.
    """
    modules = {n: m for n, m in model.named_modules() if n and list(m.children()) and _num_parameters(m)}
    return _outermost(_beside_others(model, set(modules.values())), modules) or _largest(modules)


def _beside_others(model: nn.Module, candidates: Collection[nn.Module]) -> set[nn.Module]:
    """Return the candidates that have neighbours of their class in a list."""
    repeated: set[nn.Module] = set()
    for holder in model.modules():
        if isinstance(holder, _LISTS):
            neighbours = [child for child in holder.children() if child in candidates]
            num_of = Counter(map(type, neighbours))
            repeated |= {child for child in neighbours if num_of[type(child)] > 1}
    # Lists of lists: a list of blocks is not a block itself.
    return {m for m in repeated if type(m) not in _LISTS or repeated.isdisjoint(m.children())}


def _largest(modules: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules of the repeated class that holds most parameters; containers do not count."""
    by_class: dict[type, dict[str, nn.Module]] = {}
    for name, module in modules.items():
        if type(module) not in _LISTS:
            by_class.setdefault(type(module), {})[name] = module
    repeated = [_outermost(set(group.values()), group) for group in by_class.values()]
    repeated = [group for group in repeated if len(group) > 1]
    return max(repeated, key=lambda group: sum(_num_parameters(m) for _, m in group), default=[])


def _outermost(wanted: set[nn.Module], modules: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    outermost: list[tuple[str, nn.Module]] = []
    for name, module in modules.items():  # outer modules come first
        if module in wanted and not any(name.startswith(f"{outer}.") for outer, _ in outermost):
            outermost.append((name, module))
    return outermost


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
