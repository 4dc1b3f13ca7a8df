"""checkpoint-incomplete: checkpoints from which a training cannot continue as it was."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.files import CheckpointSaved
from instep.check.rule import Rule
from instep.check.source.functions import assignments, calls_below, function_around, loops_around, names_in
from instep.check.source.module import SourceModule
from instep.check.source.resuming import is_written_once, resumes_training
from instep.check.source.saved_dicts import (
    SavedDict,
    has_average,
    lacks_average,
    saved_dicts,
    scripts_parts,
    unread_parts,
)

_RESUMED = re.compile(r"ckpt|checkpoint|latest|last|resume|snapshot", re.IGNORECASE)
_EXPORTED = re.compile(r"best|final|weights|export|model", re.IGNORECASE)
_KEPT = re.compile(r"best|final|export", re.IGNORECASE)
_EVALUATES = {"eval", "no_grad", "inference_mode"}
_TRAINS = {"backward", "manual_backward"}
_WORDS = {
    "optimizer": "the optimizer's state",
    "scheduler": "the schedule's state",
    "scaler": "the GradScaler's state",
    "progress": "the epoch or step",
    "generator": "the random generators' states",
}


class CheckpointIncomplete(Rule):
    """Compares what was saved with what the training has used."""

    id = "checkpoint-incomplete"
    severity = Severity.WARNING
    effect = "A resumed training is another one: momentum, learning rate, loss scale or position begin anew."
    watches: ClassVar = {CheckpointSaved: "a checkpoint that is saved"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield checkpoints that lack something."""
        saved = {(save.file, save.line): save for saves in observed.by_rank(CheckpointSaved) for save in saves}
        for place, save in saved.items():
            if not _is_to_resume(save.path, save.holds, modules) or _is_kept_for_use(modules, place, save):
                continue
            lacks = [part for part in (*save.uses, "progress") if part not in save.holds]
            written = [
                _dict_place(module, item)
                for module in modules
                for item in saved_dicts(module)
                if module.place(item.node) == place
            ]
            yield from self._report(
                next(iter(written), place), lacks, save.holds, f"{os.path.basename(save.path)} holds"
            )

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse lines whose checkpoints were seen: their parts were, not their averaged weights."""
        is_of_parts = finding.message.startswith("The checkpoint lacks") and "averaged" not in finding.message
        return is_of_parts and observed.has_at(CheckpointSaved, finding.place)

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield dicts that are saved without something that the file uses."""
        for saved in saved_dicts(module):
            if _is_written_to_resume(module, saved) and not _is_kept(module, saved, _path_of(module, saved)):
                lacks = [part for part in (*scripts_parts(module), "progress") if part not in saved.holds]
                yield from self._report(_dict_place(module, saved), lacks, sorted(saved.holds), "it holds")
        yield from self._averages(module)
        for saved, key, part in unread_parts(module) if resumes_training(module) else ():
            yield self.finding(
                module.place(saved.saved),
                f"`{key}` is saved, and nothing reads it when the training is resumed.",
                f"the file loads other entries of its checkpoint, and not {_WORDS[part]}",
                f'+ {part}.load_state_dict(state["{key}"])',
            )

    def _averages(self, module: SourceModule) -> Iterable[Finding]:
        """Yield the checkpoint of a script that resumes and begins its averaged weights anew."""
        saves = [saved for saved in saved_dicts(module) if "optimizer" in saved.holds]
        missing = [name for saved in saves if (name := lacks_average(module, saved))]
        if saves and len(missing) == len(saves) and resumes_training(module):
            yield self.finding(
                _dict_place(module, saves[0]),
                f"The checkpoint lacks the averaged weights, `{missing[0]}`.",
                f"it holds: {', '.join(sorted(saves[0].holds))}; after a restart the average begins anew",
                f'+ "{missing[0].rpartition(".")[2]}": {missing[0]}.state_dict(),',
            )

    def _report(self, place: tuple[str, int], lacks: list[str], holds: list[str], what: str) -> Iterable[Finding]:
        if not lacks:
            return
        missing = " and ".join(_WORDS[part] for part in lacks)
        held = ", ".join(holds) or "nothing that was recognised"
        fix = "\n".join(f"+ {part!r}: {_value(part)}," for part in lacks)
        message = f"The checkpoint lacks {missing}."
        yield self.finding(place, message, f"{what}: {held}", fix)


def _is_to_resume(path: str, holds: list[str], modules: Sequence[SourceModule]) -> bool:
    """Return whether a file is meant to continue from, not an export of weights."""
    if "model" not in holds:
        return False
    if set(holds) - {"model"}:
        return True
    if any(_loads_to_predict(module) for module in modules):
        return False
    name = os.path.basename(path)
    resumes = any("resume" in line.lower() for module in modules for line in module.lines)
    return bool(_RESUMED.search(name)) or (resumes and not _EXPORTED.search(name))


def _is_written_to_resume(module: SourceModule, saved: SavedDict) -> bool:
    if "model" not in saved.holds:
        return False
    if saved.holds - {"model"}:
        return True
    if _loads_to_predict(module):
        return False
    is_repeated = any(loops_around(module, saved.node))
    return is_repeated and bool(_RESUMED.search(ast.unparse(saved.path))) if saved.path is not None else False


def _is_kept_for_use(modules: Sequence[SourceModule], place: tuple[str, int], save: CheckpointSaved) -> bool:
    """Return whether weights are kept for use after training, as the source shows that writes them."""
    written = [(module, call.node) for module in modules for call in module.calls_of("torch.save")]
    is_last = any(module.place(node) == place and is_written_once(module, node) for module, node in written)
    resumes = any(resumes_training(module) for module in modules)
    if is_last and (not resumes or set(save.holds) <= {"model"}):
        return True
    if resumes or set(save.holds) - {"model", "progress"}:
        return False
    name = os.path.basename(save.path)
    if _KEPT.search(name) or not _RESUMED.search(name):
        return True
    return any(
        _is_kept_elsewhere(module, node) or has_average(node) for module, node in written if module.place(node) == place
    )


def _is_kept(module: SourceModule, saved: SavedDict, path: str) -> bool:
    """Return whether a dict has weights and their epoch, and is the best one, the last one, or has their average."""
    if is_written_once(module, saved.node) and (not resumes_training(module) or saved.holds <= {"model"}):
        return True
    if saved.holds - {"model", "progress"} or resumes_training(module):
        return False
    if _KEPT.search(path) or (saved.path is not None and not _RESUMED.search(path)):
        return True
    if has_average(saved.saved):  # which is what one uses
        return True
    return _is_kept_elsewhere(module, saved.node)


def _is_kept_elsewhere(module: SourceModule, node: ast.Call) -> bool:
    """Return whether the same variable is also saved as the best or final one."""
    saved = node.args[0] if node.args else None
    return isinstance(saved, ast.Name) and any(
        isinstance(other := call.argument("obj", 0), ast.Name)
        and other.id == saved.id
        and (path := call.argument("f", 1)) is not None
        and _KEPT.search(ast.unparse(path))
        for call in module.calls_of("torch.save")
        if call.node is not node
    )


def _path_of(module: SourceModule, saved: SavedDict) -> str:
    """Return a path as the source has it, with what its variables are set to."""
    if saved.path is None:
        return ""
    values = [value for names, value in assignments(module.tree) if names & names_in(saved.path)]
    return " ".join(ast.unparse(node) for node in [saved.path, *(v for v in values if len(ast.unparse(v)) < 200)])


def _loads_to_predict(module: SourceModule) -> bool:
    """Return whether a file loads what it saved, and only in functions that evaluate and do not train."""
    functions = [function_around(module, call.node) for call in module.calls if call.name == "torch.load"]
    calls = [{call.last for call in calls_below(module, function)} for function in functions]
    return bool(calls) and all(names & _EVALUATES and not names & _TRAINS for names in calls)


def _value(part: str) -> str:
    return {"progress": "epoch", "generator": "torch.get_rng_state()"}.get(part, f"{part}.state_dict()")


def _dict_place(module: SourceModule, saved: SavedDict) -> tuple[str, int]:
    return module.place(saved.saved)
