"""Find a plan for a model that brings none.

With an example of the model's call, by trying: every Linear goes by columns, unless what comes in is a part already;
then it goes by rows. So the pairs of attention and MLP find each other whatever they are called, and heads are split
wherever the code between them lets them be ([Note: Slices]). Without one, only what torch's own modules fix for certain
is paired; other layers are joined after each, which is right for any code around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from instep.parallel.capture import Call
from instep.parallel.dropout import RowDropout
from instep.parallel.tensor import layers
from instep.parallel.tensor.apply import dress, is_plain, ways_of, why_not
from instep.parallel.tensor.check import answer_of
from instep.parallel.tensor.layers import Undecided, Way
from instep.parallel.tensor.plan import (
    COLUMNS,
    HEADS,
    REPLICATE,
    ROWS,
    WHOLE_COLUMNS,
    LayerPlan,
    TensorPlan,
    kind_of,
)
from instep.parallel.tensor.slice import Notes, Refused, noting
from instep.parallel.tensor.team import Team

_SMALL = 0.01
"""A kind of layer with less of all parameters is not worth an exchange of its own."""
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Hardswish, nn.Identity, RowDropout,
)  # fmt: skip


def candidates(model: nn.Module, team: Team) -> dict[str, LayerPlan]:
    """Find the layers that could be split by themselves, and how; also why one could not."""
    found: dict[str, LayerPlan] = {}
    inner: set[str] = set()
    for path, module in model.named_modules():
        if path in inner:
            continue
        if is_plain(module, nn.MultiheadAttention):
            reason = why_not(module, HEADS, team)
            found[path] = LayerPlan(REPLICATE if reason else HEADS, reason)
            inner |= {f"{path}.{name}" for name, _ in module.named_modules() if name}
        elif is_plain(module, nn.Linear) or is_plain(module, nn.Embedding):
            reason = why_not(module, WHOLE_COLUMNS, team)
            found[path] = LayerPlan(REPLICATE if reason else WHOLE_COLUMNS, reason)
    _settle_shared(found, model, team)
    return found


def _settle_shared(found: dict[str, LayerPlan], model: nn.Module, team: Team) -> None:
    """A weight that several modules share is cut one way: by words, where they are embeddings and heads."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((path, module))
    for shared in users.values():
        if len(shared) == 1:
            continue
        by_words = all(
            path in found and not why_not(module, ROWS if isinstance(module, nn.Embedding) else WHOLE_COLUMNS, team)
            for path, module in shared
        )
        for path, module in shared:
            if path not in found:
                continue
            if by_words:
                found[path] = LayerPlan(ROWS if isinstance(module, nn.Embedding) else WHOLE_COLUMNS, tied=True)
            else:
                found[path] = LayerPlan(REPLICATE, "its weight is another layer's, too")


def certain_plan(model: nn.Module, team: Team) -> TensorPlan:
    """Make a plan without having seen the model compute."""
    found = candidates(model, team)
    for up, down in _certain_pairs(model):
        can = all(path in found and found[path] == LayerPlan(WHOLE_COLUMNS) for path in (up, down))
        if can and not why_not(model.get_submodule(down), ROWS, team):
            found[up], found[down] = LayerPlan(COLUMNS), LayerPlan(ROWS)
    plan = TensorPlan("found without an example of the model's call, so only what is certain", found)
    _leave_small(plan, model)
    return plan


def _certain_pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Find Linears with nothing but elementwise functions between them, in modules whose forward pass is torch's."""
    for path, module in model.named_modules():
        under = f"{path}." if path else ""
        if is_plain(module, nn.TransformerEncoderLayer) or is_plain(module, nn.TransformerDecoderLayer):
            yield f"{under}linear1", f"{under}linear2"
        elif is_plain(module, nn.Sequential):
            up: str | None = None
            for name, child in module.named_children():
                if is_plain(child, nn.Linear):
                    if up is not None:
                        yield up, f"{under}{name}"
                    up = None if up is not None else f"{under}{name}"
                elif not isinstance(child, _ELEMENTWISE):
                    up = None


def tried_plan(model: nn.Module, team: Team, call: Call) -> TensorPlan:
    """Make a plan by letting the model compute with split layers. Called on all ranks."""
    found = candidates(model, team)
    source = "found by trying"
    while True:
        ways = _trial_ways(model, TensorPlan(source, found))
        changes = dress(model, team, ways)
        with noting() as notes:
            try:
                answer_of(model, call, with_gradients=False)
                decided = {path: _decision(model, path, ways) for path in found}
                break
            except Exception as error:
                if not _step_back(found, notes, error):
                    raise
            finally:
                changes.undo()
    plan = TensorPlan(source, {path: _settled(path, found[path], decided[path], notes, team) for path in found})
    plan.pairs = [set(map(kind_of, {consumer, *origins})) for consumer, origins in notes.used.items()]
    plan.pairs = [pair for number, pair in enumerate(plan.pairs) if pair not in plan.pairs[:number]]
    _leave_small(plan, model)
    return plan


def _trial_ways(model: nn.Module, plan: TensorPlan) -> dict[str, Way]:
    ways = {path: way for path, way in ways_of(model, plan).items() if way is not None}
    for path, layer in plan.layers.items():
        if ways.get(path) is layers.LINEAR_WHOLE_COLUMNS and not layer.why:
            # A weight that an embedding has, too, can go by columns only.
            ways[path] = layers.LINEAR_COLUMNS if layer.tied else layers.LINEAR_UNDECIDED
    return ways


def _decision(model: nn.Module, path: str, ways: dict[str, Way]) -> str | None:
    """What an undecided layer has decided on; None: it was none, or never called."""
    module = model.get_submodule(path)
    if ways.get(path) is not layers.LINEAR_UNDECIDED:
        return None
    assert isinstance(module, Undecided)
    if module._way is None:
        return REPLICATE
    return ROWS if module._way is layers.LINEAR_ROWS else COLUMNS


def _step_back(found: dict[str, LayerPlan], notes: Notes, error: Exception) -> bool:
    """Let the layers whose parts the user's code could not take give whole tensors; False: there are none."""
    origins = set(error.origins) if isinstance(error, Refused) else {notes.last} - {""}
    kinds = {kind_of(path) for path in origins}
    stepped = False
    for path, layer in found.items():
        if kind_of(path) in kinds and layer.word != REPLICATE:
            reason = f"its parts are refused: {error}".splitlines()[0][:120]
            # Joined by itself first; if even that fails, whole.
            again = layer.why != "" or layer.word == HEADS
            found[path] = LayerPlan(REPLICATE if again else WHOLE_COLUMNS, reason)
            stepped = True
    return stepped


def _settled(path: str, layer: LayerPlan, decided: str | None, notes: Notes, team: Team) -> LayerPlan:
    """Word what a trial has shown of a layer."""
    if decided == REPLICATE:
        return LayerPlan(REPLICATE, "the example does not use it")
    if decided == ROWS:
        return LayerPlan(ROWS)
    if decided is None and not (layer.tied and layer.word == WHOLE_COLUMNS):
        return layer
    if any(path in origins for origins in notes.used.values()):
        return replace(layer, word=COLUMNS)
    if path in notes.uneven_heads:
        sizes = " × ".join(map(str, notes.uneven_heads[path]))
        return LayerPlan(WHOLE_COLUMNS, f"heads: {sizes}, which tp={team.size} does not divide")
    reason = notes.joined.get(path, "output")
    return layer if reason == "output" else replace(layer, why=f"for {reason}")


def _leave_small(plan: TensorPlan, model: nn.Module) -> None:
    """Leave layers whole that stand alone and are not worth it."""
    total = sum(p.numel() for p in model.parameters())
    sizes: dict[str, int] = {}
    for path in plan.layers:
        module = model.get_submodule(path)
        sizes[kind_of(path)] = sizes.get(kind_of(path), 0) + sum(p.numel() for p in module.parameters())
    for path, layer in plan.layers.items():
        if layer.word == WHOLE_COLUMNS and not layer.tied and sizes[kind_of(path)] < _SMALL * total:
            plan.layers[path] = LayerPlan(REPLICATE, "small")


def without_slices(plan: TensorPlan, kinds: set[str], why: str) -> TensorPlan:
    """Let layers of these kinds be joined after each, where parts went from one to the other."""
    changed = dict(plan.layers)
    for path, layer in plan.layers.items():
        if layer.word in (COLUMNS, ROWS) and not layer.tied and kind_of(path) in kinds:
            changed[path] = LayerPlan(WHOLE_COLUMNS, f"with parts, {why}")
    return TensorPlan(plan.source, changed)
