"""A model as a chain: layers that are applied one after the other, and make up the model.

[Note: Chains]
A Task may name the layers. Otherwise the model's forward pass is traced with torch.fx, its submodules as they are and
containers unrolled, and may be cut wherever exactly one computed value is still needed. The model's inputs are not
counted: every stage reads the same batch, so each has them. The same goes for what is made of inputs and buffers alone
(positions, masks): a stage that needs it makes it itself.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from instep.core.errors import TaskError
from instep.parallel.capture import Call
from instep.parallel.preserve import evaluating
from instep.parallel.strategy import Layers

StageFunction = Callable[[Call, Any], Any]
"""Computes a run of layers: from the model's call, and from what the layers before gave (None for the first run)."""
_REMEDY = "Define layers(model) in the Task: the layers that, applied one after the other, make up the model."


@dataclass
class Uses:
    """What a run of layers works with, by identity."""

    modules: set[int] = field(default_factory=set)
    tensors: set[int] = field(default_factory=set)
    """Parameters and buffers."""

    def add_module(self, module: nn.Module) -> None:
        """Note a module with all that is in it."""
        self.modules |= {id(m) for m in module.modules()}
        self.tensors |= {id(t) for t in (*module.parameters(), *module.buffers())}

    def __or__(self, other: Uses) -> Uses:
        return Uses(self.modules | other.modules, self.tensors | other.tensors)


class Chain(Protocol):
    """Layers one after the other."""

    names: list[str]
    """One a layer, for people."""

    def uses(self, number: int) -> Uses:
        """Tell what a layer works with."""

    def stage(self, first: int, last: int) -> StageFunction:
        """Give what computes the layers first..last-1."""


def find_chain(model: nn.Module, layers: Layers | None, call: Call | None, least: int) -> Chain:
    """Make a chain of at least so many layers of a model, or say why it cannot be one."""
    if layers is not None:
        return _Listed(model, list(layers(model)), call)
    call = call or _bare_call(model)
    reasons = []
    for deep in (False, True):
        try:
            chain = _Traced(model, call, deep)
        except Exception as error:  # noqa: BLE001 - whatever a forward pass does with a stand-in for a tensor
            reasons.append(f"its forward pass cannot be traced ({type(error).__name__}: {_first_line(error)})")
            continue
        if len(chain.names) >= least:
            return chain
        count = len(chain.names)
        reasons.append(
            f"it can be cut into {count} {'pieces' if count > 1 else 'piece'} only, where a single value passes from "
            "one to the next"
        )
    raise TaskError(
        f"a {type(model).__name__} cannot be cut into {least} stages: {reasons[-1]}. {_REMEDY} Or use fewer processes "
        "along pp."
    )


class _Listed:
    """Layers that the Task names."""

    def __init__(self, model: nn.Module, layers: list[Callable[..., Any]], call: Call | None) -> None:
        for number, layer in enumerate(layers):
            if not callable(layer):
                raise TaskError(
                    f"layers(model) gave a {type(layer).__name__} at position {number}; modules or functions are "
                    "needed."
                )
        self.names = [_name_in(model, layer, number) for number, layer in enumerate(layers)]
        self._layers = layers
        self._uses = [Uses() for _ in layers]
        if all(isinstance(layer, nn.Module) for layer in layers):
            for layer, uses in zip(layers, self._uses, strict=True):
                uses.add_module(cast(nn.Module, layer))
        elif call is not None:
            self._watch(model, call)
        else:
            raise TaskError(
                "layers(model) gave functions, and what they compute with shows only when they are called. Give "
                "modules, or let run.prepare know an example of the model's call."
            )

    def _watch(self, model: nn.Module, call: Call) -> None:
        """Go through the layers once, and see what they use: of a function this cannot be told otherwise."""
        value: Any = None
        with quietly(model):
            for number, uses in enumerate(self._uses):
                with _Watch(model, uses):
                    value = self.stage(number, number + 1)(call, value)

    def uses(self, number: int) -> Uses:
        return self._uses[number]

    def stage(self, first: int, last: int) -> StageFunction:
        layers = self._layers[first:last]

        def run(call: Call, value: Any) -> Any:
            for number, layer in enumerate(layers, first):
                value = layer(*call.positional, **call.named) if number == 0 else layer(value)
            return value

        return run


@contextlib.contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, without gradients, and leave it as it was."""
    with evaluating(model), torch.no_grad():
        yield


class _Watch(TorchFunctionMode):
    """Notes the modules that are called, and the parameters and buffers that functions are called with."""

    def __init__(self, model: nn.Module, into: Uses) -> None:
        super().__init__()
        self._known = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._into = into
        self._hook: Any = None

    def __enter__(self) -> Any:
        self._hook = register_module_forward_pre_hook(lambda module, _: self._into.add_module(module))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        leaves = tree_flatten((args, kwargs))[0]
        self._into.tensors |= {id(leaf) for leaf in leaves if id(leaf) in self._known}
        return func(*args, **(kwargs or {}))


class _Tracer(fx.Tracer):
    """Records a forward pass; `deep`: also what is inside of modules that hold lists of blocks."""

    proxy_buffer_attributes = True

    def __init__(self, call: Call, deep: bool) -> None:
        super().__init__()
        self.leaves, self.spec = tree_flatten((call.positional, call.named))
        self._deep = deep

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del module_qualified_name
        return not (type(m).forward is nn.Sequential.forward or (self._deep and _holds_blocks(m)))

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Take what a model asserts of its inputs for true: they cannot be looked at here."""
        return _is_asserted() or super().to_bool(obj)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Let the model be called as it is in training, with stand-ins for the tensors only."""
        del is_module, concrete_args
        given = [
            self.create_proxy("placeholder", f"input_{number}", (), {}) if isinstance(leaf, torch.Tensor) else leaf
            for number, leaf in enumerate(self.leaves)
        ]
        positional, named = tree_unflatten(given, self.spec)

        def forward(*arguments: Any) -> Any:
            return root_fn(*arguments, **named)

        return forward, [self.root, *positional]


def _is_asserted() -> bool:
    """Tell whether the user's code asks for a truth only to assert it."""
    frame = inspect.currentframe()
    own = (__file__, str(Path(fx.__file__).parent))
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    if frame is None:
        return False
    upcoming = [step for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti]
    return any("AssertionError" in step.argrepr or "ASSERTION" in step.opname for step in upcoming[:3])


class _Traced:
    """Layers found in a model's forward pass ([Note: Chains])."""

    def __init__(self, model: nn.Module, call: Call, deep: bool) -> None:
        tracer = _Tracer(call, deep)
        self._graph = tracer.trace(model)
        self._model = model
        self._leaves, self._spec = tracer.leaves, tracer.spec
        nodes = list(self._graph.nodes)
        self._output = nodes[-1]
        self._free = _free_nodes(nodes, model)
        self._work = [node for node in nodes[:-1] if node not in self._free]
        self._cuts = _find_cuts(self._work, self._output)
        """After which node of the work each layer ends, and the value that passes on; none for the last."""
        ends = [end for end, _ in self._cuts] + [len(self._work)]
        self._runs = list(zip([0, *ends[:-1]], ends, strict=True))
        self.names = [_name_of(self._work[first:last]) for first, last in self._runs]

    def uses(self, number: int) -> Uses:
        found = Uses()
        for node in _needed(self._work[slice(*self._runs[number])], self._free):
            if node.op == "call_module":
                found.add_module(self._model.get_submodule(str(node.target)))
            elif node.op == "get_attr":
                found.tensors.add(id(_attribute(self._model, str(node.target))))
        return found

    def stage(self, first: int, last: int) -> StageFunction:
        module = fx.GraphModule(self._model, self._graph_of(first, last))

        def run(call: Call, value: Any) -> Any:
            inputs = self._inputs(call)
            return module(*inputs) if first == 0 else module(value, *inputs)

        return run

    def _graph_of(self, first: int, last: int) -> fx.Graph:
        """Copy the nodes of some layers into a graph of their own."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        if first > 0:
            copies[self._cuts[first - 1][1]] = graph.placeholder("value")
        for node in self._graph.nodes:
            if node.op == "placeholder":
                copies[node] = graph.placeholder(str(node.target))
        work = self._work[self._runs[first][0] : self._runs[last - 1][1]]
        result: Any = self._output.args[0] if last == len(self._runs) else self._cuts[last - 1][1]
        for node in _needed([*work, self._output] if last == len(self._runs) else work, self._free):
            if node not in copies and node is not self._output:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(map_arg(result, copies.__getitem__))
        return graph

    def _inputs(self, call: Call) -> list[torch.Tensor]:
        """Give the tensors of a call, which must be of the same form as the one that was traced."""
        leaves, spec = tree_flatten((call.positional, call.named))
        if spec != self._spec or any(map(_differ, leaves, self._leaves)):
            raise TaskError(
                "the model is called with other arguments than at first (besides tensors, their values count, too). A "
                f"pipeline is cut for one way to call it. {_REMEDY}"
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _differ(leaf: Any, known: Any) -> bool:
    if isinstance(known, torch.Tensor):
        return not isinstance(leaf, torch.Tensor)
    return isinstance(leaf, torch.Tensor) or bool(leaf != known)


def _free_nodes(nodes: list[fx.Node], model: nn.Module) -> set[fx.Node]:
    """Find the nodes that any stage can make by itself: inputs, attributes, and what is made of inputs and buffers."""
    free: set[fx.Node] = set()
    weights: set[fx.Node] = set()
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            free.add(node)
            if node.op == "get_attr" and isinstance(_attribute(model, str(node.target)), nn.Parameter):
                weights.add(node)
        elif _is_repeatable(node) and all(given in free - weights for given in node.all_input_nodes):
            free.add(node)
    return free


def _is_repeatable(node: fx.Node) -> bool:
    """Tell whether it is a function that gives the same again, and changes nothing."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    random = any(word in name for word in ("rand", "dropout", "bernoulli", "multinomial", "normal_"))
    return not random and not name.endswith("_") and bool(node.users)


def _find_cuts(work: list[fx.Node], output: fx.Node) -> list[tuple[int, fx.Node]]:
    """Find where exactly one value is still needed: after how many nodes, and which."""
    place = {node: number for number, node in enumerate(work)} | {output: len(work)}
    last_use = [max((place[user] for user in node.users if user in place), default=-1) for node in work]
    cuts = []
    for end in range(1, len(work)):
        alive = [node for number, node in enumerate(work[:end]) if last_use[number] >= end]
        if len(alive) == 1:
            cuts.append((end, alive[0]))
    return cuts


def _needed(work: Sequence[fx.Node], free: set[fx.Node]) -> list[fx.Node]:
    """Give nodes with the free ones that they are made of, in order."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        for given in node.all_input_nodes:
            if given in free and given not in found:
                visit(given)
        found[node] = None

    for node in work:
        visit(node)
    return list(found)


def _attribute(model: nn.Module, name: str) -> Any:
    found: Any = model
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _name_of(work: Sequence[fx.Node]) -> str:
    modules = [str(node.target) for node in work if node.op == "call_module"]
    return modules[-1] if modules else work[-1].name


def _name_in(model: nn.Module, layer: Any, number: int) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    return names.get(id(layer)) or str(getattr(layer, "__name__", f"layer {number}"))


def _holds_blocks(module: nn.Module) -> bool:
    """Tell whether a module of the user's goes through a list of blocks."""
    own = not type(module).__module__.startswith("torch.nn.")
    return own and any(isinstance(child, nn.ModuleList) and len(child) > 1 for child in module.children())


def _bare_call(model: nn.Module) -> Call:
    """Stand in for a call that is not known: each argument that has to be given is a tensor."""
    given = [p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty]
    plain = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return Call(tuple(torch.empty(0) for _ in plain), {})


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
