"""load-map-location: checkpoints that are loaded onto the device of another rank."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.files import CheckpointLoaded
from instep.check.rule import Rule
from instep.check.source.collective_calls import is_distributed, mentions_accelerator
from instep.check.source.functions import names_in
from instep.check.source.module import Call, SourceModule

_FIX = '- torch.load(path)\n+ torch.load(path, map_location="cpu")'


class LoadMapLocation(Rule):
    """Compares the devices of loaded tensors with the rank's own."""

    id = "load-map-location"
    severity = Severity.WARNING
    effect = (
        "Every rank loads onto the GPU that the file was saved from: its memory fills up, and ranks may compute there."
    )
    watches: ClassVar = {CheckpointLoaded: "a checkpoint that is loaded"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:  # noqa: ARG002
        """Yield loads whose tensors went to another device."""
        for rank, loads in enumerate(observed.by_rank(CheckpointLoaded)):
            for load in loads:
                others = [device for device in load.devices if device not in ("cpu", "meta", load.own_device)]
                if others:
                    yield self.finding(
                        (load.file, load.line),
                        "A checkpoint is loaded onto the device of another rank.",
                        f"rank {rank} is on {load.own_device}, and its tensors went to {', '.join(others)}",
                        _FIX,
                        Severity.ERROR,
                    )
                    return

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield loads of weights without map_location, or onto a fixed GPU."""
        if not is_distributed(module):
            return
        for call in module.calls_of("torch.load"):
            location = call.argument("map_location", 1)
            is_fixed = isinstance(location, ast.Constant) and str(location.value).startswith("cuda:")
            if (location is None or is_fixed) and _restores(module, call) and not _keywords_unknown(call):
                yield self.finding(
                    module.place(call.node),
                    "A checkpoint is loaded onto a fixed GPU, on all ranks."
                    if is_fixed
                    else "A checkpoint is loaded without map_location: its tensors go to the GPU they were saved from.",
                    f"`{module.line(call.node.lineno)}`",
                    _FIX,
                    None if mentions_accelerator(module) else Severity.NOTE,
                )


def _restores(module: SourceModule, call: Call) -> bool:
    """Return whether what is loaded goes to a load_state_dict, or is returned to somebody who may do that."""
    for outer in module.around(call.node):
        if isinstance(outer, ast.Call) and "load_state_dict" in ast.unparse(outer.func):
            return "sched" not in ast.unparse(outer.func)  # the state of a schedule has no tensors
        if isinstance(outer, ast.Return):
            return True
        if isinstance(outer, ast.Assign):
            names = {name for target in outer.targets for name in names_in(target)}
            return _used_by_load_state_dict(module, names)
        if isinstance(outer, ast.stmt):
            return False
    return False


def _used_by_load_state_dict(module: SourceModule, names: set[str]) -> bool:
    return any(names & names_in(argument) for call in module.calls_of("load_state_dict") for argument in call.node.args)


def _keywords_unknown(call: Call) -> bool:
    return any(keyword.arg is None for keyword in call.node.keywords)
