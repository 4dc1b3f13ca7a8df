"""process-group-setup: how a script joins and leaves its process group."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.collectives import ProcessGroupJoined, ProcessGroupLeft
from instep.check.records.run import Ended
from instep.check.rule import Rule
from instep.check.source.module import Call, SourceModule

_PORT = re.compile(r"^tcp://.*:\d+$")
_NO_TIMEOUT = "The process group has no timeout of its own: a hang is noticed after 10 (nccl) or 30 minutes (gloo)."
_CHOOSES_DEVICE = ("set_device", "set_device_index", "device")


class ProcessGroupSetup(Rule):
    """Looks at init_process_group, and at what is there before and after it."""

    id = "process-group-setup"
    severity = Severity.NOTE
    effect = "The training itself is not changed; a hang lasts longer, jobs collide, or the end is not clean."
    watches: ClassVar = {ProcessGroupJoined: "init_process_group"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:  # noqa: ARG002
        """Yield what is missing where the script's own code joined its process group."""
        joins = [join for joins in observed.by_rank(ProcessGroupJoined) for join in joins if not join.package]
        if not joins:
            return
        place = (joins[0].file, joins[0].line)
        findings = list(self._judge_join(observed, joins, place))
        yield from findings
        if not joins[0].has_timeout and (findings or "nccl" in joins[0].backend):
            yield self._no_timeout(place, f"backend {joins[0].backend or 'by default'}, no timeout given")

    def _judge_join(
        self, observed: Observed, joins: Sequence[ProcessGroupJoined], place: tuple[str, int]
    ) -> Iterator[Finding]:
        if _PORT.match(joins[0].init_method):
            yield self._fixed_port(place, f"init_method={joins[0].init_method!r}")
        if not all(join.has_device for join in joins) and len(joins) > 1:
            yield self._no_device(place, "a rank other than the first had device 0 when it joined")
        ends = [end for ends in observed.by_rank(Ended) for end in ends]
        if ends and all(end.how == "complete" for end in ends) and not observed.has(ProcessGroupLeft):
            yield self._no_destroy(place, "all ranks ended without destroy_process_group")

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield what the source of init_process_group shows, and fixed ports."""
        for call in module.calls_of("torch.distributed.init_process_group", "init_process_group"):
            findings = list(self._read_join(module, call))
            yield from findings
            unknown = any(keyword.arg is None for keyword in call.node.keywords)
            is_nccl = "nccl" in ast.unparse(call.argument("backend", 0) or call.node)
            if call.argument("timeout", 2) is None and not unknown and (findings or is_nccl):
                yield self._no_timeout(module.place(call.node), f"`{module.line(call.node.lineno)}`")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assign) and _sets_port(node) and isinstance(node.value, ast.Constant):
                yield self._fixed_port(module.place(node), f"`{module.line(node.lineno)}`")

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse a missing timeout where the ranks were seen to join with another backend than nccl."""
        joins = [join for joins in observed.by_rank(ProcessGroupJoined) for join in joins]
        return finding.message == _NO_TIMEOUT and bool(joins) and not any("nccl" in join.backend for join in joins)

    def _read_join(self, module: SourceModule, call: Call) -> Iterator[Finding]:
        place, code = module.place(call.node), f"`{module.line(call.node.lineno)}`"
        unknown = any(keyword.arg is None for keyword in call.node.keywords)
        method = call.argument("init_method", 1)
        if isinstance(method, ast.Constant) and _PORT.match(str(method.value)):
            yield self._fixed_port(place, code)
        backend = call.argument("backend", 0)
        if backend is not None and "nccl" in ast.unparse(backend) and not unknown and not _chooses_device(module, call):
            yield self._no_device(place, code)
        if not any(True for _ in module.calls_of("destroy_process_group")):
            yield self._no_destroy(place, f"{code}, and no destroy_process_group in this file")

    def _no_timeout(self, place: tuple[str, int], evidence: str) -> Finding:
        return self.finding(place, _NO_TIMEOUT, evidence, "dist.init_process_group(…, timeout=timedelta(minutes=5))")

    def _fixed_port(self, place: tuple[str, int], evidence: str) -> Finding:
        message = "The rendezvous port is fixed: a second job on the node fails, or joins the first."
        fix = "Leave MASTER_PORT to the launcher (instep run, torchrun), and use init_method='env://'."
        return self.finding(place, message, evidence, fix, Severity.WARNING)

    def _no_device(self, place: tuple[str, int], evidence: str) -> Finding:
        message = (
            "A rank joins with nccl before it has chosen its device: barriers and objects go to GPU 0 on all ranks."
        )
        fix = "+ torch.cuda.set_device(local_rank)\n  dist.init_process_group('nccl')"
        return self.finding(place, message, evidence, fix, Severity.WARNING)

    def _no_destroy(self, place: tuple[str, int], evidence: str) -> Finding:
        message = "The process group is never destroyed: the last collectives of other ranks may fail at the end."
        return self.finding(place, message, evidence, "+ dist.destroy_process_group()  # at the end")


def _chooses_device(module: SourceModule, join: Call) -> bool:
    if join.argument("device_id") is not None:
        return True
    return any(
        (call.last in _CHOOSES_DEVICE and "cuda" in call.name) or call.last in _CHOOSES_DEVICE[:2]
        for call in module.calls
    ) or any("CUDA_VISIBLE_DEVICES" in line for line in module.lines)


def _sets_port(node: ast.Assign) -> bool:
    return any("environ" in ast.unparse(target) and "MASTER_PORT" in ast.unparse(target) for target in node.targets)
