"""Micro-batches that are summed where they should be averaged, or averaged with the wrong weights."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.gradients import BackwardRan, ForwardRan, GradientsCleared, OptimizerBuilt, StepTaken
from instep.check.records.scaling import common_factor, gradients_after_backward, gradients_before_clipping
from instep.check.records.timeline import TrainingStep, steps_of
from instep.check.rule import Rule
from instep.check.source.framework_losses import divided_for_frameworks
from instep.check.source.module import SourceModule
from instep.check.source.wrapped_models import loops_around, scope_of

_UNEVEN = 0.05
"""Relative: micro-batches whose numbers of targets differ by less are taken for equal."""
_TWICE = "The loss is divided by the number of micro-batches, and the framework divides it by that again."


class AccumulationScale(Rule):
    """Finds losses that are accumulated without being divided, or divided without regard to their tokens."""

    id = "accumulation-scale"
    severity = Severity.WARNING
    effect = (
        "Gradients are not those of one large batch: too large by the number of micro-batches, or wrongly weighted."
    )
    watches = {BackwardRan: "a backward pass"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield undivided losses, then means over different numbers of targets."""
        for steps in steps_of(observed, 0).values() if observed.world_size else ():
            yield from self._last_window(steps)
            rounds = [micro for step in steps if len(micro := accumulated(step)) > 1 and _has_batches(step, micro)]
            if any(_is_divided_later(step) for step in steps):
                continue
            if rounds and all(_is_undivided(micro) for micro in rounds):
                yield self._undivided(rounds, len(steps), modules)
            elif uneven := [micro for micro in rounds if _is_uneven(micro)]:
                yield self._uneven(uneven, len(steps), modules)

    def _last_window(self, steps: Sequence[TrainingStep]) -> Iterable[Finding]:
        """Yield micro-batches at the end of an epoch that are thrown away, or added to the next epoch's first step."""
        counts = [len(step.of(BackwardRan)) for step in steps]
        usual = max(set(counts), key=counts.count) if counts else 0
        if usual < 2 or counts.count(usual) < len(counts) // 2:
            return
        for step, count in zip(steps, counts, strict=True):
            extra = count - usual
            if not 0 < extra < usual:
                continue
            before = 0
            lost = 0
            for event in step.events:
                before += isinstance(event, BackwardRan)
                if isinstance(event, GradientsCleared) and event.lost and before == extra:
                    lost = extra
            if len([one for one in counts if one == count]) < 2 and len(steps) > 40:
                continue
            what = "thrown away" if lost else "added to the first step of the next one"
            yield self.finding(
                step.place,
                f"The last micro-batches of an epoch are {what}.",
                f"{usual} backward passes make a step, and {extra} are left over at the end of an epoch",
                "Step after the last batch as well: if (i + 1) % steps == 0 or i + 1 == len(loader)",
            )
            return

    def _undivided(
        self, rounds: Sequence[Sequence[BackwardRan]], num_steps: int, modules: Sequence[SourceModule]
    ) -> Finding:
        micro = rounds[0]
        return self.finding(
            _backward_place(modules, micro[-1]),
            f"{len(micro)} backward passes make a step, and no loss is divided by {len(micro)}.",
            f"in {len(rounds)} of {num_steps} steps; each loss is a mean, multiplied by {micro[0].factor:g}; "
            f"the first step's are {', '.join(f'{backward.loss:.4g}' for backward in micro[:4])}",
            f"(loss / {len(micro)}).backward()",
        )

    def _uneven(
        self, rounds: Sequence[Sequence[BackwardRan]], num_steps: int, modules: Sequence[SourceModule]
    ) -> Finding:
        counts = ", ".join(str(backward.num_targets) for backward in rounds[0][:6])
        return self.finding(
            loss_place(modules, rounds[0][-1]),
            "Each micro-batch's loss is a mean over its own tokens, and all means count the same in a step.",
            f"in {len(rounds)} of {num_steps} steps the numbers of tokens differ; in the first: {counts}",
            'Sum the loss (reduction="sum") and divide by the tokens of all micro-batches and ranks '
            "(times the world size, where gradients are averaged over ranks).",
        )

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield backward passes of undivided losses where the optimizer steps only every few of them."""
        for call in module.calls_of("backward"):
            loop = next(iter(loops_around(module, call.node)), None)
            if loop is None or not _steps_now_and_then(module, loop) or _divides(module, call.node):
                continue
            yield self.finding(
                module.place(call.node),
                "The optimizer steps only every few backward passes, and the loss is not divided by their number.",
                module.line(call.node.lineno),
                "(loss / accumulate).backward()",
            )

        for call, value in divided_for_frameworks(module):
            twice = self.finding(
                module.place(value),
                _TWICE,
                f"`{module.line(value.lineno)}` reaches `{module.line(call.node.lineno)}`",
                "Leave the division to the framework.",
            )
            yield replace(twice, effect="Gradients are too small by the number of micro-batches.")

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse lines that ran: `judge` has seen their factors."""
        is_undivided = finding.message != _TWICE
        return is_undivided and observed.has(StepTaken) and observed.has_at(BackwardRan, finding.place)


def accumulated(step: TrainingStep) -> list[BackwardRan]:
    """Return the backward passes of one line whose gradients a step adds up."""
    passes: list[BackwardRan] = []
    for event in step.events:
        if isinstance(event, GradientsCleared | OptimizerBuilt) and event.optimizer == step.taken.optimizer:
            passes = []
        elif isinstance(event, BackwardRan):
            if step.taken.optimizer in event.cleared:
                passes = []
            passes.append(event)
    return [event for event in passes if (event.file, event.line) == (passes[-1].file, passes[-1].line)]


def _has_batches(step: TrainingStep, micro: Sequence[BackwardRan]) -> bool:
    """Return whether each backward pass had a forward pass of its own: one batch may have several losses."""
    forwards = [forward for forward in step.of(ForwardRan) if forward.enabled]
    return not forwards or len(forwards) >= len(micro)


def _is_divided_later(step: TrainingStep) -> bool:
    """Return whether the gradients were divided by the number of micro-batches after the last backward pass."""
    factor = common_factor(gradients_after_backward(step), gradients_before_clipping(step))
    num_micro = len(accumulated(step))
    return factor is not None and num_micro > 1 and abs(factor * num_micro - 1) < 0.01


def _is_undivided(micro: Sequence[BackwardRan]) -> bool:
    """Return whether every loss is a mean that was not made smaller; 3/4: label smoothing, weights of a loss."""
    return all(backward.reduction == "mean" and 0.75 <= abs(backward.factor) <= 1.25 for backward in micro)


def _is_uneven(micro: Sequence[BackwardRan]) -> bool:
    counts = [backward.num_targets for backward in micro if backward.reduction == "mean"]
    ignores = any(backward.num_ignored for backward in micro)
    return ignores and len(counts) == len(micro) and max(counts) - min(counts) > _UNEVEN * max(counts)


def _backward_place(modules: Sequence[SourceModule], backward: BackwardRan) -> tuple[str, int]:
    """Return where the user calls backward; where a framework does, where the loss was computed."""
    place = backward.file, backward.line
    own = any(module.path == place[0] and "backward" in module.line(place[1]) for module in modules)
    return place if own else loss_place(modules, backward)


def loss_place(modules: Sequence[SourceModule], backward: BackwardRan) -> tuple[str, int]:
    """Return where the loss was computed: the assignment above the backward pass, or the only cross entropy."""
    for module in modules:
        if module.path == backward.file and ".backward(" in module.line(backward.line):
            name = module.line(backward.line).partition(".backward(")[0].strip()
            for line in range(backward.line - 1, max(0, backward.line - 30), -1):
                if module.line(line).startswith(f"{name} = "):
                    return module.path, line
    losses = [module.place(call.node) for module in modules for call in module.calls_of("cross_entropy", "nll_loss")]
    return losses[0] if len(losses) == 1 else (backward.file, backward.line)


def _steps_now_and_then(module: SourceModule, loop: ast.For | ast.While) -> bool:
    """Return whether a loop steps under an `if … % n …`."""
    for call in module.calls_of("step"):
        outer = list(module.around(call.node))
        if loop in outer and "sched" not in call.name:
            tests = [node.test for node in outer[: outer.index(loop)] if isinstance(node, ast.If)]
            return any(isinstance(part, ast.Mod) for test in tests for part in ast.walk(test))
    return False


def _divides(module: SourceModule, backward: ast.Call) -> bool:
    """Return whether a function that calls backward divides or scales anything: the loss, or gradients."""
    scope = scope_of(module, backward)
    operators = (ast.Div, ast.Mult)
    return any(
        isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, operators) for node in ast.walk(scope)
    ) or any(call.last in ("div_", "mul_", "div", "mul") for call in module.calls)
