"""Ranks that use another rank's device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.gradients import ForwardRan
from instep.check.rule import Rule
from instep.check.source.module import Call, SourceModule
from instep.check.source.wrapped_models import DDP

_INDEXED = re.compile(r"(cuda|xpu|hpu|npu|mlu):\d+")
_TAKES_DEVICE = (
    "to",
    "device",
    "cuda",
    "set_device",
    "empty",
    "ones",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "full",
    "arange",
)
_RANK = re.compile(r"rank", re.IGNORECASE)


class WrongDevice(Rule):
    """Finds fixed devices in scripts of several processes, and inputs or models on another rank's device."""

    id = "wrong-device"
    severity = Severity.WARNING
    effect = "Ranks of a node use one GPU: it runs out of memory, or every step waits for copies between devices."
    watches = {ForwardRan: "a forward pass under DDP or FSDP"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:  # noqa: ARG002
        """Yield models that share a device while others are free, and inputs of another device than their model's."""
        forwards = [calls[0] for calls in observed.by_rank(ForwardRan) if calls and calls[0].model_devices]
        accelerated = [forward for forward in forwards if forward.num_devices]
        devices = [forward.model_devices[0] for forward in accelerated]
        shared = {device for device in devices if devices.count(device) > 1}
        if shared and min(forward.num_devices for forward in accelerated) > 1:
            yield self.finding(
                (accelerated[0].file, accelerated[0].line),
                f"Several ranks have their model on {min(shared)}, and each of them sees more devices than that.",
                ", ".join(f"rank {rank}: {device}" for rank, device in enumerate(devices)),
                "torch.cuda.set_device(local_rank), and device = torch.device('cuda', local_rank)",
            )
        yield from self._inputs(accelerated)

    def _inputs(self, forwards: Sequence[ForwardRan]) -> Iterable[Finding]:
        for rank, forward in enumerate(forwards):
            foreign = [
                device for device in forward.input_devices if ":" in device and device not in forward.model_devices
            ]
            if foreign:
                yield self.finding(
                    (forward.file, forward.line),
                    f"Rank {rank} gets its inputs on {foreign[0]}, and its model is on {forward.model_devices[0]}.",
                    f"devices of the inputs: {', '.join(forward.input_devices)}",
                    "Move inputs and targets to the device of this rank's model.",
                )
                return

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield devices with a fixed number, in a file that trains with several processes."""
        if not any(name.startswith(("torch.distributed", "torch.nn.parallel")) for name in _names(module)):
            return
        for call in module.calls_of(*_TAKES_DEVICE, *DDP):
            if (device := _fixed_device(call)) and not _asks_for_rank(module, call.node):
                yield self.finding(
                    module.place(call.node),
                    f"Every rank uses {device}: the device does not depend on the local rank.",
                    module.line(call.node.lineno),
                    'torch.device("cuda", int(os.environ["LOCAL_RANK"]))',
                )


def _names(module: SourceModule) -> Iterable[str]:
    yield from module.aliases.values()
    for call in module.calls:
        yield call.name


def _fixed_device(call: Call) -> str:
    """Return the device with a number that a call is given; empty: none."""
    for argument in (*call.node.args, *(keyword.value for keyword in call.node.keywords)):
        choices = [argument.body, argument.orelse] if isinstance(argument, ast.IfExp) else [argument]
        for choice in choices:
            if isinstance(choice, ast.Constant) and isinstance(choice.value, str) and _INDEXED.fullmatch(choice.value):
                return choice.value
    first = call.node.args[0] if call.node.args else None
    if call.last in ("cuda", "set_device") and _number(first) is not None:
        return f"cuda:{_number(first)}"
    if call.last == "device" and len(call.node.args) == 2 and _number(call.node.args[1]) is not None:
        return f"device {_number(call.node.args[1])}"
    ids = call.argument("device_ids")
    if isinstance(ids, ast.List) and len(ids.elts) == 1 and _number(ids.elts[0]) is not None:
        return f"device {_number(ids.elts[0])}"
    return ""


def _number(node: ast.expr | None) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _asks_for_rank(module: SourceModule, node: ast.AST) -> bool:
    """Return whether code is under an `if` that asks for the rank."""
    tests = (outer.test for outer in module.around(node) if isinstance(outer, ast.If | ast.IfExp))
    return any(_RANK.search(ast.unparse(test)) or "is_initialized" in ast.unparse(test) for test in tests)
