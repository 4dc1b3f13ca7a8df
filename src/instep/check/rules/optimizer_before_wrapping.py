"""An optimizer that holds parameters which the model no longer has."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.gradients import ModelWrapped, OptimizerBuilt, StepTaken
from instep.check.records.timeline import TrainingStep, steps_of
from instep.check.rule import Rule
from instep.check.source.module import Call, SourceModule
from instep.check.source.wrapped_models import FSDP1, FULLY_SHARD, is_call_of, scope_of


class OptimizerBeforeWrapping(Rule):
    """Finds optimizers that were built before the parameters were replaced: by sharding, or by leaving `meta`."""

    id = "optimizer-before-wrapping"
    severity = Severity.ERROR
    effect = "optimizer.step changes parameters that nobody uses: the model is not trained."
    watches = {StepTaken: "an optimizer step"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:  # noqa: ARG002
        """Yield optimizers whose parameters never get a gradient while the model's own belong to none."""
        for optimizer, steps in steps_of(observed, 0).items() if observed.world_size else ():
            if len(steps) > 1 and all(_is_stale(step) for step in steps) and any(step.taken.orphans for step in steps):
                orphans = max(step.taken.orphans for step in steps)
                yield self.finding(
                    _place(observed, optimizer) or steps[0].place,
                    "The optimizer was built before the model got the parameters that it trains.",
                    f"in {len(steps)} steps none of the optimizer's {steps[0].taken.num_parameters} parameters had a "
                    f"gradient, and {orphans} parameters of the model that have one belong to no optimizer",
                    "Build the optimizer last: after to_empty, fully_shard or FullyShardedDataParallel.",
                )

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield optimizers that are built above the line which shards the same model, in one function."""
        for call in module.calls:
            if not (is_call_of(call, FULLY_SHARD) or is_call_of(call, FSDP1)) or not call.node.args:
                continue
            model = module.name_of(call.node.args[0])
            for built in _optimizers(module, model) if model else ():
                same = scope_of(module, built.node) is scope_of(module, call.node)
                if same and built.node.lineno < call.node.lineno:
                    yield self.finding(
                        module.place(built.node),
                        f"The optimizer takes the parameters of `{model}` before it is sharded, which replaces them.",
                        module.line(built.node.lineno),
                        f"Build the optimizer after line {call.node.lineno}.",
                        Severity.WARNING,
                    )

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse what ran: `judge` has seen whether the parameters got gradients."""
        return observed.has(StepTaken)


def _is_stale(step: TrainingStep) -> bool:
    return 0 < step.taken.num_parameters == step.taken.num_without_gradient


def _place(observed: Observed, optimizer: int) -> tuple[str, int] | None:
    """Return where the optimizer was built: in the function that also wraps the model, if there is one."""
    built = next((event for event in observed.by_rank(OptimizerBuilt)[0] if event.optimizer == optimizer), None)
    if built is None:
        return None
    wrapping = {_function(caller) for event in observed.by_rank(ModelWrapped)[0] for caller in event.callers}
    for caller in built.callers:
        if _function(caller) in wrapping:
            file, line, _ = caller.rsplit(":", 2)
            return file, int(line)
    return built.file, built.line


def _function(caller: str) -> tuple[str, str]:
    file, _, name = caller.rsplit(":", 2)
    return file, name


def _optimizers(module: SourceModule, model: str) -> Iterable[Call]:
    """Yield calls that take `model.parameters()` to make an optimizer."""
    for call in module.calls_of("parameters", "named_parameters"):
        if call.name.rpartition(".")[0] == model:
            for outer in module.around(call.node):
                if isinstance(outer, ast.Call) and "optim" in module.name_of(outer.func).lower():
                    yield Call(outer, module.name_of(outer.func))
                    break
