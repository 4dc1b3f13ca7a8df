"""device-sync: training steps in which the CPU waits for the GPU, or the GPU for data."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.run import Began
from instep.check.rule import Rule
from instep.check.source.collective_calls import mentions_accelerator
from instep.check.source.functions import Loop, calls_in, function_around, loops_around
from instep.check.source.module import Call, SourceModule

_NO_WORKERS = "The DataLoader has no workers: the device waits while batches are made."
_WAITS = ("item", "cpu", "tolist", "numpy")
_WAITS_ON_DEVICE = ("synchronize", "empty_cache")


class DeviceSync(Rule):
    """Reads what a training step does with tensors on the device."""

    id = "device-sync"
    severity = Severity.NOTE
    effect = "The result is right; each step waits for the device, and takes longer."

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield values that are fetched from the device in each step, and loaders without workers."""
        if not mentions_accelerator(module):
            return
        waits = sorted({call.node.lineno: call for call in _waits(module)}.items())
        if waits:
            first = waits[0][1]
            lines = ", ".join(str(line) for line, _ in waits)
            yield self.finding(
                module.place(first.node),
                "Each training step fetches values from the device, and waits until it has computed them.",
                f"`{module.line(first.node.lineno)}`; in all, lines {lines}",
                "Add up tensors (loss.detach()), and call .item() every N steps only.",
            )
        for call in module.calls_of("torch.utils.data.DataLoader", "DataLoader"):
            unknown = any(keyword.arg is None for keyword in call.node.keywords)
            if not unknown and _is_zero(call.argument("num_workers", 5)):
                yield self.finding(
                    module.place(call.node),
                    _NO_WORKERS,
                    f"`{module.line(call.node.lineno)}`",
                    "DataLoader(…, num_workers=4, pin_memory=True)",
                )

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse loaders without workers where the ranks had no device that could wait for them."""
        devices = {began.device for records in observed.by_rank(Began) for began in records}
        return finding.message == _NO_WORKERS and devices <= {"cpu"}


def _waits(module: SourceModule) -> Iterator[Call]:
    """Yield the calls in a training step that wait for the device, every time."""
    for backward in module.calls_of("backward"):
        step = next(loops_around(module, backward.node), None) or function_around(module, backward.node)
        if isinstance(step, ast.Module):
            continue
        for call in calls_in(module, step):
            if _is_wait(call) and _is_in_step(module, call, step) and not _is_seldom(module, call, step):
                yield call


def _is_wait(call: Call) -> bool:
    if call.last in _WAITS:
        return isinstance(call.node.func, ast.Attribute) and not call.node.args
    return call.last in _WAITS_ON_DEVICE and ("cuda" in call.name or "accelerator" in call.name)


def _is_in_step(module: SourceModule, call: Call, step: ast.AST) -> bool:
    """Return whether a call belongs to the step itself, not to a loop or function inside it."""
    loop = next(loops_around(module, call.node), None)
    if isinstance(step, Loop):
        return loop is step
    return loop is None and function_around(module, call.node) is step


def _is_seldom(module: SourceModule, call: Call, step: ast.AST) -> bool:
    """Return whether a call is made in some steps only: under an `if`, inside the step."""
    for outer in module.around(call.node):
        if outer is step:
            return False
        if isinstance(outer, ast.If | ast.IfExp) and any(isinstance(node, ast.Mod) for node in ast.walk(outer.test)):
            return True
        if isinstance(outer, ast.If) and any(
            word in ast.unparse(outer.test) for word in ("log", "print", "every", "last")
        ):
            return True
    return False


def _is_zero(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value == 0)
