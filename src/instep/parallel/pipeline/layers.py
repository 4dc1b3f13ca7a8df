"""A model as a sequence of layers that, applied one after the other, make up the model.

[Note: Layer sequences]
A Task may name the layers. Otherwise the model's forward pass is traced with torch.fx, its submodules as leaves and
containers unrolled. It may be split wherever exactly one computed value is still needed. The model's inputs do not
count: every stage reads the same batch, so each has them. The same holds for what is computed from inputs and buffers
alone (positions, masks): a stage that needs it computes it itself.
"""

import dis
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from instep.core.errors import TaskError
from instep.parallel.capture import Call
from instep.parallel.pipeline.ownership import Uses
from instep.parallel.preserve import evaluating
from instep.parallel.strategy import Layers

_REMEDY = "Define layers(model) in the Task: the layers that, applied one after the other, make up the model."
StageFunction = Callable[[Call, Any], Any]
"""Computes consecutive layers, from the model's call and the output of the layers before (None for the first)."""


class LayerSequence(Protocol):
    """Layers, one after the other."""

    names: list[str]
    """One for each layer, for messages."""

    def uses(self, number: int) -> Uses:
        """Return what a layer computes with."""

    def stage(self, first: int, last: int) -> StageFunction:
        """Return a function that computes the layers first..last-1."""

    def calls(self, module: nn.Module) -> bool:
        """Return whether a stage calls a module of the model itself, not only what is inside of it."""


def find_layers(model: nn.Module, layers: Layers | None, call: Call | None, min_layers: int) -> LayerSequence:
    """Return a model as a sequence of at least `min_layers` layers; raise with the reason if it cannot be one."""
    if layers is not None:
        return _NamedLayers(model, list(layers(model)), call)
    call = call or _tensor_call(model)
    reasons = []
    for deep in (False, True):
        try:
            traced = _TracedLayers(model, call, deep)
        except Exception as error:  # noqa: BLE001 - a forward pass may raise anything when it gets a proxy of a tensor
            first_line = str(error).strip().split("\n")[0][:200]
            reasons.append(f"its forward pass cannot be traced ({type(error).__name__}: {first_line})")
            continue
        count = len(traced.names)
        if count >= min_layers:
            return traced
        reasons.append(
            f"it can be split into {count} {'pieces' if count > 1 else 'piece'} only, where a single value passes from "
            "one to the next"
        )
    raise TaskError(
        f"a {type(model).__name__} cannot be split into {min_layers} stages: {reasons[-1]}. {_REMEDY} Or use fewer "
        "processes along pp."
    )


def _tensor_call(model: nn.Module) -> Call:
    """Return a substitute for an unknown call: each required argument is a tensor."""
    required = [p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty]
    positional = [p for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return Call(tuple(torch.empty(0) for _ in positional), {})


class _NamedLayers:
    """Layers that the Task names."""

    def __init__(self, model: nn.Module, layers: list[Callable[..., Any]], call: Call | None) -> None:
        for number, layer in enumerate(layers):
            if not callable(layer):
                raise TaskError(
                    f"layers(model) returned a {type(layer).__name__} at position {number}; it must return modules or "
                    "functions."
                )
        names = {id(module): name for name, module in model.named_modules()}
        self.names = [
            names.get(id(layer)) or str(getattr(layer, "__name__", f"layer {number}"))
            for number, layer in enumerate(layers)
        ]
        self._layers = layers
        self._uses = [Uses() for _ in layers]
        if all(isinstance(layer, nn.Module) for layer in layers):
            for layer, uses in zip(layers, self._uses, strict=True):
                uses.add_module(cast(nn.Module, layer))
        elif call is not None:
            # A function shows what it uses only when it is called.
            value: Any = None
            with evaluating(model), torch.no_grad():
                for number, uses in enumerate(self._uses):
                    recorder = _UseRecorder(model, uses)
                    with recorder, register_module_forward_pre_hook(recorder.add_module):
                        value = self.stage(number, number + 1)(call, value)
        else:
            raise TaskError(
                "layers(model) returned functions, and what they compute with shows only when they are called. Return "
                "modules, or pass run.prepare an example of the model's call."
            )

    def uses(self, number: int) -> Uses:
        return self._uses[number]

    def stage(self, first: int, last: int) -> StageFunction:
        layers = self._layers[first:last]

        def compute(call: Call, value: Any) -> Any:
            for number, layer in enumerate(layers, first):
                value = layer(*call.positional, **call.named) if number == 0 else layer(value)
            return value

        return compute

    def calls(self, module: nn.Module) -> bool:
        del module  # what the Task names is called, and calls the rest
        return True


class _UseRecorder(TorchFunctionMode):
    """Records the modules that are called, and the parameters and buffers that functions are called with."""

    def __init__(self, model: nn.Module, uses: Uses) -> None:
        super().__init__()
        self._tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._uses = uses

    def add_module(self, module: nn.Module, _inputs: Any) -> None:
        """Record a module, before its forward pass."""
        self._uses.add_module(module)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self._uses.tensors |= {id(leaf) for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._tensors}
        return func(*args, **(kwargs or {}))


class _Tracer(fx.Tracer):
    """Traces a forward pass; `deep`: also inside of modules that hold lists of blocks."""

    proxy_buffer_attributes = True

    def __init__(self, call: Call, deep: bool) -> None:
        super().__init__()
        self.leaves, self.spec = tree_flatten(call)
        self.unrolled: set[nn.Module] = set()
        self._deep = deep

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del module_qualified_name
        is_leaf = not (type(m).forward is nn.Sequential.forward or (self._deep and _holds_blocks(m)))
        if not is_leaf:
            self.unrolled.add(m)
        return is_leaf

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Assume that the model's assertions about its inputs hold: a proxy has no values."""
        return _is_asserted() or super().to_bool(obj)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Return the model's arguments as in training, with proxies for the tensors only."""
        del is_module, concrete_args
        proxies = [
            self.create_proxy("placeholder", f"input_{number}", (), {}) if isinstance(leaf, torch.Tensor) else leaf
            for number, leaf in enumerate(self.leaves)
        ]
        positional, named = tree_unflatten(proxies, self.spec)
        return partial(root_fn, **named), [self.root, *positional]


def _is_asserted() -> bool:
    """Return whether the user's code evaluates a bool only to assert it."""
    frame = inspect.currentframe()
    internal = (__file__, str(Path(fx.__file__).parent))
    while frame is not None and frame.f_code.co_filename.startswith(internal):
        frame = frame.f_back
    if frame is None:
        return False
    upcoming = [step for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti]
    return any("AssertionError" in step.argrepr or "ASSERTION" in step.opname for step in upcoming[:3])


class _TracedLayers:
    """Layers found in a model's forward pass ([Note: Layer sequences])."""

    def __init__(self, model: nn.Module, call: Call, deep: bool) -> None:
        tracer = _Tracer(call, deep)
        self._graph = tracer.trace(model)
        self._model = model
        self._leaves, self._spec, self._unrolled = tracer.leaves, tracer.spec, tracer.unrolled
        nodes = list(self._graph.nodes)
        self._output = nodes[-1]
        self._free = _free_nodes(nodes, model)
        self._nodes = [node for node in nodes[:-1] if node not in self._free]
        self._cuts = _find_cuts(self._nodes, self._output)
        """For each layer but the last: the number of nodes before its end, and the node whose value passes on."""
        ends = [end for end, _ in self._cuts] + [len(self._nodes)]
        self._runs = list(zip([0, *ends[:-1]], ends, strict=True))
        self.names = [_name_of(self._nodes[first:last]) for first, last in self._runs]

    def uses(self, number: int) -> Uses:
        uses = Uses()
        for node in _with_inputs(self._nodes[slice(*self._runs[number])], self._free):
            if node.op == "call_module":
                uses.add_module(self._model.get_submodule(str(node.target)))
            elif node.op == "get_attr":
                uses.tensors.add(id(attrgetter(str(node.target))(self._model)))
        return uses

    def stage(self, first: int, last: int) -> StageFunction:
        module = fx.GraphModule(self._model, self._graph_of(first, last))

        def compute(call: Call, value: Any) -> Any:
            inputs = self._inputs(call)
            return module(*inputs) if first == 0 else module(value, *inputs)

        return compute

    def calls(self, module: nn.Module) -> bool:
        return module not in self._unrolled

    def _graph_of(self, first: int, last: int) -> fx.Graph:
        """Return the nodes of some layers as a graph of their own."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        if first > 0:
            copies[self._cuts[first - 1][1]] = graph.placeholder("value")
        for node in self._graph.nodes:
            if node.op == "placeholder":
                copies[node] = graph.placeholder(str(node.target))
        nodes = self._nodes[self._runs[first][0] : self._runs[last - 1][1]]
        is_end = last == len(self._runs)
        result: Any = self._output.args[0] if is_end else self._cuts[last - 1][1]
        for node in _with_inputs([*nodes, self._output] if is_end else nodes, self._free):
            if node not in copies and node is not self._output:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(map_arg(result, copies.__getitem__))
        return graph

    def _inputs(self, call: Call) -> list[torch.Tensor]:
        """Return the tensors of a call, which must have the structure of the one that was traced."""
        leaves, spec = tree_flatten(call)
        if spec != self._spec or any(map(_differ, leaves, self._leaves)):
            raise TaskError(
                "the model is called with other arguments than at first (values that are no tensors count, too). A "
                f"pipeline is built for one kind of call. {_REMEDY}"
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _differ(leaf: Any, known: Any) -> bool:
    if isinstance(known, torch.Tensor):
        return not isinstance(leaf, torch.Tensor)
    return isinstance(leaf, torch.Tensor) or bool(leaf != known)


def _free_nodes(nodes: list[fx.Node], model: nn.Module) -> set[fx.Node]:
    """Return the nodes that any stage can compute: inputs, attributes, and functions of inputs and buffers."""
    free: set[fx.Node] = set()
    weights: set[fx.Node] = set()
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            free.add(node)
            if node.op == "get_attr" and isinstance(attrgetter(str(node.target))(model), nn.Parameter):
                weights.add(node)
        elif _is_repeatable(node) and all(source in free - weights for source in node.all_input_nodes):
            free.add(node)
    return free


def _is_repeatable(node: fx.Node) -> bool:
    """Return whether a node is a deterministic function without side effects."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    random = any(part in name for part in ("rand", "dropout", "bernoulli", "multinomial", "normal_"))
    return not random and not name.endswith("_") and bool(node.users)


def _find_cuts(nodes: list[fx.Node], output: fx.Node) -> list[tuple[int, fx.Node]]:
    """Return after how many nodes exactly one value is still needed, and its node."""
    position = {node: number for number, node in enumerate(nodes)} | {output: len(nodes)}
    last_use = [max((position[user] for user in node.users if user in position), default=-1) for node in nodes]
    cuts = []
    for end in range(1, len(nodes)):
        alive = [node for number, node in enumerate(nodes[:end]) if last_use[number] >= end]
        if len(alive) == 1:
            cuts.append((end, alive[0]))
    return cuts


def _with_inputs(nodes: Sequence[fx.Node], free: set[fx.Node]) -> list[fx.Node]:
    """Return nodes and the free nodes that they depend on, in order of computation."""
    ordered: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in free and source not in ordered:
                visit(source)
        ordered[node] = None

    for node in nodes:
        visit(node)
    return list(ordered)


def _name_of(nodes: Sequence[fx.Node]) -> str:
    modules = [str(node.target) for node in nodes if node.op == "call_module"]
    return modules[-1] if modules else nodes[-1].name


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether a module of the user's holds a list of blocks."""
    is_users = not type(module).__module__.startswith("torch.nn.")
    return is_users and any(isinstance(child, nn.ModuleList) and len(child) > 1 for child in module.children())
