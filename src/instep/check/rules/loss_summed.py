"""Gradients that are summed over ranks, where one process would average; or averaged twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.differences import UNWRAPPED
from instep.check.records.gradients import BackwardRan, TensorReduced
from instep.check.records.scaling import gradients_after_backward, gradients_before_clipping
from instep.check.records.timeline import TrainingStep, steps_of, steps_together, wrappers_of
from instep.check.rule import Rule
from instep.check.rules.accumulation_scale import accumulated
from instep.check.source.comm_hooks import summing_hooks
from instep.check.source.global_counts import losses_by_global_count
from instep.check.source.module import SourceModule
from instep.check.source.trainer_losses import losses_by_items_of_all
from instep.check.source.weight_sums import summed_weights

_BY_WORLD_SIZE = re.compile(
    r"/=?\s*\(?\s*[\w.]*(world_?size|get_world_size|num_processes|n_?gpus|world\b)", re.IGNORECASE
)
_TOO_SMALL = "Gradients are too small by the world size: more processes train less."
_FOR_THE_LOG = re.compile(r"item\(|detach\(|print|log")


class LossSummed(Rule):
    """Finds gradients that are the world size times those of the mean loss, or as much too small."""

    id = "loss-summed"
    severity = Severity.ERROR
    effect = "The learning rate is in effect multiplied by the world size: more processes train another recipe."
    watches = {BackwardRan: "a backward pass"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield sums of gradients, sums of losses, and losses that are divided though gradients are averaged."""
        if observed.world_size < 2:
            return
        yield from self._summed_gradients(observed)
        yield from self._averaged_twice(observed, modules)
        for steps in steps_of(observed, 0).values():
            yield from self._summed_losses(steps, observed.world_size)
            if wrappers_of(observed):
                yield from self._divided_twice(steps, observed.world_size, modules)

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield sums that are divided by a count of all ranks, where gradients are averaged over ranks besides."""
        for division in losses_by_global_count(module):
            small = self.finding(
                module.place(division),
                "The loss is divided by a count of all ranks, and the gradients are averaged over ranks besides.",
                f"`{module.line(division.lineno)}`: `{ast.unparse(division.right)}` is a sum over ranks",
                "+ loss = loss * dist.get_world_size()  # the mean over ranks divides by it",
                Severity.WARNING,
            )
            yield replace(small, effect=_TOO_SMALL)
        for node in losses_by_items_of_all(module):
            small = self.finding(
                module.place(node),
                "The loss is divided by the items of all processes, and the gradients are averaged over them besides.",
                f"`{module.line(node.lineno)}`: the Trainer has summed `num_items_in_batch` over all processes, and "
                "its own compute_loss, which this one replaces, multiplies by their number",
                "+ loss = loss * self.accelerator.num_processes",
                Severity.WARNING,
            )
            yield replace(small, effect=_TOO_SMALL)
        for call in summed_weights(module):
            summed = self.finding(
                module.place(call.node),
                "The parameters are summed over the ranks, and divided by nothing.",
                f"`{module.line(call.node.lineno)}`",
                "+ p.data /= dist.get_world_size()  # after the all_reduce",
                Severity.WARNING,
            )
            yield replace(summed, effect="The weights are multiplied by the world size.")
        for call, hook in summing_hooks(module):
            yield self.finding(
                module.place(call.node),
                f"The communication hook `{hook.name}` sums gradients over the ranks, and divides by nothing.",
                f"line {hook.lineno}: DistributedDataParallel leaves the division to its hook",
                "+ tensor.div_(dist.get_world_size())  # before the all_reduce",
                Severity.WARNING,
            )

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse runs on one rank."""
        return observed.world_size < 2

    def _summed_gradients(self, observed: Observed) -> Iterable[Finding]:
        for steps in steps_together(observed):
            ratio = _share_of_sum(steps)
            if ratio is None or abs(ratio - 1) > 0.01 or any(abs(_scale(step) - 1) > 0.25 for step in steps):
                continue
            reduced = steps[0].of(TensorReduced)
            yield self.finding(
                (reduced[-1].file, reduced[-1].line) if reduced else steps[0].place,
                "The gradients of a step are the sum of the ranks' gradients, not their mean.",
                f"sampled elements are {ratio:.3f} times the sum over {observed.world_size} ranks; each rank's loss is "
                "a mean, not divided by the world size",
                "+ p.grad /= dist.get_world_size()  # after the all_reduce",
            )
            return

    def _averaged_twice(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield losses that are divided by the world size where the script averages gradients itself."""
        for steps in steps_together(observed):
            ratio, size = _share_of_sum(steps), observed.world_size
            if ratio is None or any(abs(ratio * _scale(step) * size * size - 1) > 0.01 for step in steps):
                continue
            backward = steps[0].of(BackwardRan)[-1]
            if line := _division(modules, backward):
                small = self.finding(
                    (backward.file, line),
                    "The loss is divided by the world size, and its gradients are averaged over the ranks besides.",
                    f"gradients are 1/{size * size} of the sum over {size} ranks, not 1/{size}",
                    "Divide once: the loss, or the summed gradients.",
                    Severity.WARNING,
                )
                yield replace(small, effect=_TOO_SMALL)
            return

    def _summed_losses(self, steps: Sequence[TrainingStep], world_size: int) -> Iterable[Finding]:
        summed = [
            step.of(BackwardRan)[-1]
            for step in steps
            if (passes := step.of(BackwardRan)) and passes[-1].all_reduced and abs(_scale(step) - 1) < 0.25
        ]
        if summed:
            yield self.finding(
                (summed[0].file, summed[0].line),
                "The loss is summed over ranks by a differentiable all_reduce, and not divided by the world size.",
                f"in {len(summed)} of {len(steps)} steps; gradients are {world_size} times those of the mean loss",
                "loss = loss / dist.get_world_size()",
            )

    def _divided_twice(
        self, steps: Sequence[TrainingStep], world_size: int, modules: Sequence[SourceModule]
    ) -> Iterable[Finding]:
        small = [step for step in steps if abs(_scale(step) * world_size - 1) < 0.01 and not _is_reduced(step)]
        if not small or len(small) < len(steps):
            return
        backward = small[0].of(BackwardRan)[-1]
        line = _division(modules, backward)
        if line:
            yield self.finding(
                (backward.file, line),
                "The loss is divided by the world size, though DistributedDataParallel averages gradients already.",
                f"in {len(small)} of {len(steps)} steps the losses of a step add up to 1/{world_size} of their mean",
                "Leave the division out; divide only what is logged.",
                Severity.WARNING,
            )


def _scale(step: TrainingStep) -> float:
    """Return by how much the mean loss of a step's micro-batches is multiplied; 0: not known."""
    micro = accumulated(step)
    if not micro or any(backward.reduction != "mean" for backward in micro):
        return 0.0
    return sum(backward.factor for backward in micro)


def _is_reduced(step: TrainingStep) -> bool:
    return any(backward.all_reduced for backward in step.of(BackwardRan))


def _share_of_sum(steps: Sequence[TrainingStep]) -> float | None:
    """Return c where a step's gradients are c times the sum of the ranks' own; None: they are not."""
    if any(UNWRAPPED not in step.taken.wrappers for step in steps):
        return None
    local = [gradients_after_backward(step) for step in steps]
    used = [gradients_before_clipping(step) for step in steps]
    if len({len(values) for values in (*local, *used)}) != 1 or not local[0] or _are_equal(local):
        return None
    total = [sum(values) for values in zip(*local, strict=True)]
    square = sum(value * value for value in total)
    if not square or not _are_equal(used):
        return None
    share = sum(a * b for a, b in zip(used[0], total, strict=True)) / square
    rest = sum((a - share * b) ** 2 for a, b in zip(used[0], total, strict=True))
    return share if rest <= 1e-4 * share * share * square else None


def _are_equal(ranks: Sequence[Sequence[float]]) -> bool:
    return all(
        abs(value - first) <= 1e-4 * abs(first) + 1e-12
        for values in ranks[1:]
        for value, first in zip(values, ranks[0], strict=True)
    )


def _division(modules: Sequence[SourceModule], backward: BackwardRan) -> int:
    """Return the line above a backward pass that divides a loss by the world size; 0: there is none."""
    for module in modules:
        if module.path == backward.file:
            for line in range(backward.line, max(0, backward.line - 15), -1):
                text = module.line(line)
                if _BY_WORLD_SIZE.search(text) and "loss" in text and not _FOR_THE_LOG.search(text):
                    return line
    return 0
