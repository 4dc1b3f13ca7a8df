"""Find a plan for a model that has none.

With an example of the model's call, by trying: every Linear is colwise, unless its input is sharded already; then it is
rowwise. So the pairs of attention and MLP are found whatever their names, and heads are split wherever the code between
layers allows it ([Note: Slices]). Without an example, only the pairs that torch's own modules fix are used; the outputs
of other layers are gathered, which is right for any code around them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from instep.parallel.capture import Call
from instep.parallel.dropout import RowDropout
from instep.parallel.tensor import layers
from instep.parallel.tensor.apply import is_plain, splits_of, try_splits, why_not
from instep.parallel.tensor.check import answer_of
from instep.parallel.tensor.group import TensorParallelGroup
from instep.parallel.tensor.layers import LayerSplit, UndecidedLinear
from instep.parallel.tensor.plan import COLWISE, COLWISE_REP, HEADS, REPLICATE, ROWWISE, LayerPlan, TensorPlan, kind_of
from instep.parallel.tensor.slice import Refused, SliceRecord, record_slices

_SMALL = 0.01
"""A kind of layer with a smaller share of all parameters is not worth a collective."""
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Hardswish, nn.Identity, RowDropout,
)  # fmt: skip


def candidates(model: nn.Module, group: TensorParallelGroup) -> dict[str, LayerPlan]:
    """Return the layers that could be split, each by itself: how, or why not."""
    plans: dict[str, LayerPlan] = {}
    inner: set[str] = set()
    for path, module in model.named_modules():
        if path in inner:
            continue
        if is_plain(module, nn.MultiheadAttention):
            reason = why_not(module, HEADS, group)
            plans[path] = LayerPlan(REPLICATE if reason else HEADS, reason)
            inner |= {f"{path}.{name}" for name, _ in module.named_modules() if name}
        elif is_plain(module, nn.Linear) or is_plain(module, nn.Embedding):
            reason = why_not(module, COLWISE_REP, group)
            plans[path] = LayerPlan(REPLICATE if reason else COLWISE_REP, reason)
    _unify_tied(plans, model, group)
    return plans


def _unify_tied(plans: dict[str, LayerPlan], model: nn.Module, group: TensorParallelGroup) -> None:
    """Shard a weight that several modules share along one dimension: by tokens, if they are embeddings and heads."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((path, module))
    whole = LayerPlan(REPLICATE, "its weight is another layer's, too")
    for shared in users.values():
        if len(shared) == 1:
            continue
        styles = {path: ROWWISE if isinstance(module, nn.Embedding) else COLWISE_REP for path, module in shared}
        by_tokens = all(path in plans and not why_not(module, styles[path], group) for path, module in shared)
        for path in styles.keys() & plans.keys():
            plans[path] = LayerPlan(styles[path], tied=True) if by_tokens else whole


def plan_without_example(model: nn.Module, group: TensorParallelGroup) -> TensorPlan:
    """Return a plan for a model that has not been called."""
    plans = candidates(model, group)
    for up, down in _certain_pairs(model):
        can = all(plans.get(path) == LayerPlan(COLWISE_REP) for path in (up, down))
        if can and not why_not(model.get_submodule(down), ROWWISE, group):
            plans[up], plans[down] = LayerPlan(COLWISE), LayerPlan(ROWWISE)
    plan = TensorPlan("found without an example of the model's call, so only what is certain", plans)
    _replicate_small(plan, model)
    return plan


def _certain_pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield Linears with only elementwise functions between them, in modules whose forward pass is torch's."""
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


def plan_by_trial(model: nn.Module, group: TensorParallelGroup, call: Call) -> TensorPlan:
    """Return a plan found by running the model with split layers. Called on all ranks."""
    plans = candidates(model, group)
    source = "found by trying"
    while True:
        splits = _trial_splits(model, TensorPlan(source, plans))
        with try_splits(model, group, splits), record_slices() as record:
            try:
                answer_of(model, call, with_gradients=False)
                layers = {path: _plan_after_trial(path, model, plans[path], record, group) for path in plans}
                break
            except Exception as error:
                if not _gather_refused(plans, record, error):
                    raise
    plan = TensorPlan(source, layers)
    plan.pairs = [set(map(kind_of, {consumer, *origins})) for consumer, origins in record.used.items()]
    plan.pairs = [pair for number, pair in enumerate(plan.pairs) if pair not in plan.pairs[:number]]
    _replicate_small(plan, model)
    return plan


def _trial_splits(model: nn.Module, plan: TensorPlan) -> dict[str, LayerSplit]:
    splits = splits_of(model, plan)
    for path, layer in plan.layers.items():
        if splits.get(path) is layers.GATHERED_COLWISE_LINEAR and not layer.why:
            # A weight that is also an embedding's can be colwise only.
            splits[path] = layers.COLWISE_LINEAR if layer.tied else layers.UNDECIDED_LINEAR
    return splits


def _gather_refused(plans: dict[str, LayerPlan], record: SliceRecord, error: Exception) -> bool:
    """Make layers whose Slices the user's code could not take return whole tensors; return whether there are any."""
    origins = set(error.origins) if isinstance(error, Refused) else {record.last} - {""}
    kinds = {kind_of(path) for path in origins}
    refused = [path for path, plan in plans.items() if kind_of(path) in kinds and plan.style != REPLICATE]
    for path in refused:
        reason = f"its parts are refused: {error}".splitlines()[0][:120]
        # Gathered at first; if even that fails, replicated.
        is_second = plans[path].why != "" or plans[path].style == HEADS
        plans[path] = LayerPlan(REPLICATE if is_second else COLWISE_REP, reason)
    return bool(refused)


def _plan_after_trial(
    path: str, model: nn.Module, layer: LayerPlan, record: SliceRecord, group: TensorParallelGroup
) -> LayerPlan:
    """Return the plan of a layer after a trial, with the reason if its output was gathered."""
    module = model.get_submodule(path)
    if isinstance(module, UndecidedLinear):
        if module._split is None:  # it was not called
            return LayerPlan(REPLICATE, "the example does not use it")
        if module._split is layers.ROWWISE_LINEAR:
            return LayerPlan(ROWWISE)
    elif not (layer.tied and layer.style == COLWISE_REP):
        return layer
    if any(path in origins for origins in record.used.values()):
        return replace(layer, style=COLWISE)
    if path in record.uneven_heads:
        sizes = " × ".join(map(str, record.uneven_heads[path]))
        return LayerPlan(COLWISE_REP, f"heads: {sizes}, which tp={group.size} does not divide")
    reason = record.gathered.get(path, "output")
    return layer if reason == "output" else replace(layer, why=f"for {reason}")


def _replicate_small(plan: TensorPlan, model: nn.Module) -> None:
    """Replicate small layers whose output is gathered: they are not worth a collective."""
    total = sum(p.numel() for p in model.parameters())
    sizes = Counter[str]()
    for path in plan.layers:
        sizes[kind_of(path)] += sum(p.numel() for p in model.get_submodule(path).parameters())
    for path, layer in plan.layers.items():
        if layer.style == COLWISE_REP and not layer.tied and sizes[kind_of(path)] < _SMALL * total:
            plan.layers[path] = LayerPlan(REPLICATE, "small")


def without_slices(plan: TensorPlan, kinds: set[str], why: str) -> TensorPlan:
    """Return the plan with layers of these kinds gathered, so that no Slice passes from one to another."""
    changed = dict(plan.layers)
    for path, layer in plan.layers.items():
        if layer.style in (COLWISE, ROWWISE) and not layer.tied and kind_of(path) in kinds:
            changed[path] = LayerPlan(COLWISE_REP, f"with parts, {why}")
    return TensorPlan(plan.source, changed)
