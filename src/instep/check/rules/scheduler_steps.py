"""scheduler-steps: a learning-rate schedule that advances too often, or before the optimizer."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.gradients import StepTaken
from instep.check.records.schedules import SchedulerStepped
from instep.check.rule import Rule
from instep.check.source.collective_calls import is_distributed
from instep.check.source.functions import calls_in, function_around, loops_around
from instep.check.source.module import SourceModule
from instep.check.source.rank_guards import guard_of_callers
from instep.check.source.schedule_calls import is_scheduler, made_in_epochs, prepared_schedules
from instep.check.source.schedule_lengths import undivided_lengths

_MIN_IDLE = 5
_OF_SOME_RANKS = "Only some ranks step the schedule; the others keep their learning rate, and the replicas part."


class SchedulerSteps(Rule):
    """Compares the steps of each scheduler with those of its optimizer."""

    id = "scheduler-steps"
    severity = Severity.WARNING
    effect = "The learning rate is not the one that the schedule was meant to give."
    watches: ClassVar = {SchedulerStepped: "a step of a learning-rate schedule"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield schedules that advanced too early, too often, or past their end."""
        steps = max(observed.by_rank(SchedulerStepped), key=len, default=[])
        for number in {step.scheduler for step in steps}:
            own = [step for step in steps if step.scheduler == number]
            finding = self._too_early(own) or self._too_often(own) or self._past_end(own)
            if finding is not None:
                yield finding
            elif own[0].package == "accelerate" and observed.world_size > 1:
                prepared = [
                    self._prepared(module, call, own) for module in modules for call in prepared_schedules(module)
                ]
                yield from prepared or self._at_zero(observed, own)
            else:
                yield from self._at_zero(observed, own)

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse calls of `step` that were seen, and runs on one rank."""
        if finding.message == _OF_SOME_RANKS:
            return observed.world_size < 2
        return observed.has_at(SchedulerStepped, finding.place)

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield calls of `step` before the optimizer's, and schedules in epochs that are stepped for each batch."""
        for call in module.calls:
            if call.last != "step" or not is_scheduler(module, call.node.func.value):  # type: ignore[attr-defined]
                continue
            if (guard := guard_of_callers(module, call.node)) is not None and is_distributed(module):
                yield self._some_ranks(module, call.node, guard.node)
                continue
            updates = _updates_beside(module, call.node)
            is_always = not any(isinstance(outer, ast.If) for outer in module.around(call.node))
            if updates and is_always and all(update.lineno > call.node.lineno for update in updates):
                yield self._early_finding(module.place(call.node), f"`{module.line(call.node.lineno)}` comes first")
                continue
            made = made_in_epochs(module, call.node.func.value)  # type: ignore[attr-defined]
            if made is not None and _in_same_loop(module, call.node, updates):
                evidence = f"`{module.line(made.lineno)}` counts epochs; `step()` is called after each optimizer step"
                yield self._epochs_finding(module.place(call.node), evidence)
        for prepared in prepared_schedules(module):
            yield self._prepared(module, prepared, [])
        for made in undivided_lengths(module):
            yield self._too_long(module.place(made), f"`{module.line(made.lineno)}` counts the batches of all ranks")

    def _some_ranks(self, module: SourceModule, node: ast.Call, guard: ast.stmt | ast.expr) -> Finding:
        evidence = f"`{module.line(node.lineno)}` is executed under line {guard.lineno}: `{module.line(guard.lineno)}`"
        fix = "Step the schedule on all ranks."
        return self.finding(module.place(node), _OF_SOME_RANKS, evidence, fix, Severity.ERROR)

    def _too_early(self, own: list[SchedulerStepped]) -> Finding | None:
        first = own[0]
        again = any(step.updates and (step.file, step.line) == (first.file, first.line) for step in own)
        if first.updates or first.package or not again:
            return None
        evidence = f"{first.type} had advanced to {first.position} when the optimizer made its first step"
        return self._early_finding((first.file, first.line), evidence)

    def _early_finding(self, place: tuple[str, int], evidence: str) -> Finding:
        message = "The schedule advances before the optimizer's step, so the first learning rate is never used."
        return self.finding(place, message, evidence, "- scheduler.step()\n  optimizer.step()\n+ scheduler.step()")

    def _too_often(self, own: list[SchedulerStepped]) -> Finding | None:
        counts = Counter(step.updates for step in own if step.updates)
        times, steps = Counter(counts.values()).most_common(1)[0] if counts else (1, 0)
        if own[0].package or times < 2 or steps < 3 or steps < 0.8 * len(counts):
            return None
        last = own[-1]
        at_once = all(a.backwards == b.backwards for a, b in pairwise(own) if a.updates == b.updates)
        when = "in immediate succession" if at_once else "once for each micro-batch"
        return self.finding(
            (last.file, last.line),
            f"{last.type} advances {times} times for each optimizer step.",
            f"in {steps} of {len(counts)} optimizer steps `step()` was called {times} times, {when}",
            "Call scheduler.step() once after each optimizer.step().",
            Severity.ERROR if at_once and _from_several_lines(own) else None,
        )

    def _at_zero(self, observed: Observed, own: list[SchedulerStepped]) -> Iterable[Finding]:
        """Yield that an optimizer goes on with a learning rate of 0, where there is only one."""
        taken = max(observed.by_rank(StepTaken), key=len, default=[])
        rates = [step.learning_rate for step in taken]
        last = len(rates) - next((n for n, rate in enumerate(reversed(rates)) if rate), len(rates))
        idle = len(rates) - last
        if len({step.optimizer for step in taken}) != 1 or not last or idle < max(_MIN_IDLE, len(rates) // 10):
            return
        yield self.finding(
            (own[-1].file, own[-1].line),
            "The learning rate is 0 long before the training ends: the schedule is made for fewer steps than it gets.",
            f"in the last {idle} of {len(rates)} optimizer steps it was 0; the schedule advanced {len(own)} times",
            "Count the steps of the schedule as it is stepped: a scheduler that Accelerate prepared advances once per "
            "process.",
        )

    def _past_end(self, own: list[SchedulerStepped]) -> Finding | None:
        last = own[-1]
        if last.package or last.type != "CosineAnnealingLR" or not last.horizon or last.position <= last.horizon:
            return None
        evidence = (
            f"T_max={last.horizon}, but `step()` was called {last.position} times in {last.updates} optimizer steps"
        )
        return self._epochs_finding((last.file, last.line), evidence)

    def _too_long(self, place: tuple[str, int], evidence: str) -> Finding:
        return self.finding(
            place,
            "The schedule is made for the steps of one process: with several, the training ends long before it does.",
            evidence,
            "- total_steps = epochs * (len(dataset) // batch_size)\n+ total_steps = epochs * len(loader)"
            "  # of the loader with the DistributedSampler",
        )

    def _epochs_finding(self, place: tuple[str, int], evidence: str) -> Finding:
        return self.finding(
            place,
            "The schedule is made for fewer steps than it gets: it counts epochs, but advances after each batch.",
            evidence,
            "Call scheduler.step() once an epoch, or make the schedule for epochs * len(loader) steps.",
        )

    def _prepared(self, module: SourceModule, call: ast.Call, own: list[SchedulerStepped]) -> Finding:
        counts = Counter(step.updates for step in own if step.updates)
        seen = f"; {len(own)} steps of the schedule in {len(counts)} optimizer steps" if own else ""
        return self.finding(
            module.place(call),
            "Accelerate steps a prepared scheduler once per process, but its length counts the steps of one process.",
            f"`{module.line(call.lineno)}`: its length is that of one process{seen}",
            "Multiply the length by accelerator.num_processes, or do not prepare the scheduler.",
        )


def _from_several_lines(own: list[SchedulerStepped]) -> bool:
    return len({(step.file, step.line) for step in own}) > 1


def _updates_beside(module: SourceModule, node: ast.Call) -> list[ast.Call]:
    """Return the optimizer steps in the innermost loop around a call."""
    loop = next(loops_around(module, node), None)
    if loop is None:
        return []
    function = function_around(module, node)
    return [
        call.node
        for call in calls_in(module, loop)
        if call.last == "step" and call.node is not node and _names_optimizer(call.node.func)
        if function_around(module, call.node) is function
    ]


def _in_same_loop(module: SourceModule, node: ast.Call, updates: list[ast.Call]) -> bool:
    loop = next(loops_around(module, node), None)
    return any(next(loops_around(module, update), None) is loop for update in updates)


def _names_optimizer(func: ast.expr) -> bool:
    name = ast.unparse(func).lower()
    return "opt" in name or "scaler" in name
