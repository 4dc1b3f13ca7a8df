"""Rule resume-replays: a resumed training sees samples of its epoch again, or begins with the wrong epoch's order."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.passes import MIN_COMPARED, LoaderPass, passes_by_rank, training_passes
from instep.check.records.data import EpochLoaded
from instep.check.rule import Rule
from instep.check.source.functions import assignments, calls_in, trains
from instep.check.source.loops import function_around, loops_around, within
from instep.check.source.module import Call, SourceModule

_SAVES = ("torch.save",)
_SKIPS = ("islice", "skip_first_batches", "StatefulDataLoader", "consumed_samples", "start_index", "start_iter", "skip")
_POSITION = re.compile(r"batch|sample|position|consumed|offset|skip|cursor")
_MIDDLE = "A checkpoint from the middle of an epoch is resumed at the epoch's beginning."
_SKIP = "+ for batch in itertools.islice(loader, checkpoint['batches_done'], None):  # in the first epoch"


class ResumeReplays(Rule):
    """Finds checkpoints from the middle of an epoch that are resumed at its beginning."""

    id = "resume-replays"
    severity = Severity.WARNING
    effect = "After each restart the first samples of an epoch count twice, or its last ones are never seen."
    watches: ClassVar[dict[type[Observation], str]] = {EpochLoaded: "a checkpoint that is loaded"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield that the order after a resume is not that of the epoch which the checkpoint names."""
        if not observed.world_size or not (loaded := observed.by_rank(EpochLoaded)[0]):
            return
        later = [one for one in passes_by_rank(observed)[0] if one.began.step >= loaded[-1].step]
        if later and later[0].is_exhausted and not later[0].batches:
            yield self.finding(
                (later[0].began.file, later[0].began.line),
                "The resumed training skips an epoch: its loader has no batches.",
                f"the first iteration after {os.path.basename(loaded[-1].file)}:{loaded[-1].line} loaded a checkpoint "
                "gave no batch",
                "+ skip = 0  # for a checkpoint from an epoch's end, which continues with the next epoch",
            )
            return
        passes = [group[0] for group in training_passes(observed)]
        before = [one for one in passes if one.began.step < loaded[-1].step]
        for one in (one for one in passes if one.began.step >= loaded[-1].step):
            epoch = loaded[-1].epoch
            if one.made.has_distributed_sampler and one.made.is_shuffled and epoch > 0 == one.began.sampler_epoch:
                yield self.finding(
                    (loaded[-1].file, loaded[-1].line),
                    f"The training resumes in epoch {epoch} with the order of epoch 0.",
                    f"the file says epoch {epoch}, and the DistributedSampler was at epoch 0 when the first batch came",
                    "+ for epoch in range(checkpoint['epoch'] + 1, epochs):\n+     sampler.set_epoch(epoch)",
                )
            elif evidence := _replayed(before, one):
                place = next(
                    (m.place(s) for m in modules if (s := _resumed_epoch(m))), (loaded[-1].file, loaded[-1].line)
                )
                yield self.finding(place, _MIDDLE, evidence, _SKIP)
            return

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield checkpoints that are written inside the loop over batches and resumed without skipping any."""
        loads = [
            call for call in module.calls_of("load") if call.name == "torch.load" and not _only_weights(module, call)
        ]
        saves = [save for save in _saves(module) if _is_between_batches(module, save)]
        if not loads or not saves or _skips(module, saves[0]):
            return
        yield self.finding(
            module.place(_resumed_epoch(module) or loads[0].node),
            _MIDDLE,
            f"line {saves[0].lineno} saves inside the loop over batches: {module.line(saves[0].lineno)}",
            _SKIP,
        )


def _replayed(before: Sequence[LoaderPass], one: LoaderPass) -> str:
    """Return how many samples of an epoch that was broken off came again, in its order; empty: none did."""
    for earlier in before:
        compared = min(len(earlier.indices), len(one.indices))
        if (
            compared >= MIN_COMPARED
            and not earlier.is_exhausted
            and earlier.indices[:compared] == one.indices[:compared]
        ):
            return f"after the checkpoint was loaded, {compared} samples of the epoch came again, from its first one on"
    return ""


def _is_between_batches(module: SourceModule, save: ast.Call) -> bool:
    """Return whether a call is in the inner one of two loops, and that one trains."""
    loops = loops_around(module, save)
    return len(loops) > 1 and trains(module, loops[0])


def _saves(module: SourceModule) -> list[ast.Call]:
    """Return calls that save a checkpoint: torch.save, and functions of the file that call it."""
    direct = [call.node for call in module.calls if call.name in _SAVES]
    names = {function.name for save in direct if (function := function_around(module, save)) is not None}
    return direct + [call.node for call in module.calls if call.last in names]


def _only_weights(module: SourceModule, call: Call) -> bool:
    """Return whether a loaded file goes into a model as a whole: then it is not resumed."""
    loads = [outer for outer in module.around(call.node) if isinstance(outer, ast.Call)]
    if any(module.name_of(outer.func).endswith("load_state_dict") for outer in loads):
        return True
    scope = function_around(module, call.node) or module.tree
    names = {name for names, value in assignments(scope) if value is call.node for name in names}
    wholes = [load.argument("state_dict", 0) for load in calls_in(module, scope) if load.last == "load_state_dict"]
    return any(isinstance(whole, ast.Name) and whole.id in names for whole in wholes)


def _skips(module: SourceModule, save: ast.Call) -> bool:
    """Return whether the file has a way to go on in the middle of an epoch."""
    if any(name in _SKIPS for name in _used(module)) or any(_POSITION.search(key) for key in _keys_read(module)):
        return True
    loop = loops_around(module, save)[0]
    if any(isinstance(node, ast.Continue) for node in within(loop)):
        return True
    owners = [call.name for call in module.calls_of("load_state_dict")]
    return any("sampler" in owner or "loader" in owner or "data" in owner for owner in owners) or not _is_over_data(
        loop
    )


def _used(module: SourceModule) -> Iterator[str]:
    """Yield the names that a file reads or calls; one that is only assigned does nothing."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _keys_read(module: SourceModule) -> Iterator[str]:
    """Yield the texts that a file reads entries by, as in `checkpoint["batches_done"]`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)


def _is_over_data(loop: ast.For | ast.While) -> bool:
    """Return whether a loop goes over batches: not over numbers of steps, which have no epoch to be resumed in."""
    return isinstance(loop, ast.For) and "range(" not in ast.unparse(loop.iter)


def _resumed_epoch(module: SourceModule) -> ast.stmt | None:
    """Return the statement that takes the epoch from the loaded file."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            text = ast.unparse(node.value)
            if "['epoch']" in text or "['current_epoch']" in text:
                return node
    return None
