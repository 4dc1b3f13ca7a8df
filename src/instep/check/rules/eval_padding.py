"""Rule eval-padding: an evaluation counts samples twice, or leaves some out, to give every rank as many."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.passes import LoaderPass, evaluations, passes_by_rank
from instep.check.records.data import EvaluationSeen, LoaderMade
from instep.check.rule import Rule
from instep.check.source.gathered_orders import misplaced_results
from instep.check.source.kept_once import keeps_each_once
from instep.check.source.loops import function_around, module_of, statement_at
from instep.check.source.module import SourceModule
from instep.check.source.names import mentions


class EvalPadding(Rule):
    """Finds evaluations whose samples are not those of the dataset, each once."""

    id = "eval-padding"
    severity = Severity.WARNING
    effect = "The metric is that of another set of samples, and changes with the number of processes."
    watches: ClassVar[dict[type[Observation], str]] = {EvaluationSeen: "an evaluation to its end"}

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield results of all ranks that are put beside rows in another order."""
        for one in misplaced_results(module):
            beside = ast.unparse(one.beside)
            misplaced = self.finding(
                module.place(one.gathered),
                f"Results that are gathered rank by rank are put beside `{beside}`, which is in the dataset's order.",
                f"line {one.used.lineno}, `{module.line(one.used.lineno)}`: the sampler deals samples out in turn, and "
                f"`{beside}` is not gathered",
                "Gather the samples' numbers with the results in the same way, and sort by them.",
            )
            yield replace(misplaced, effect="Rows get the results of other rows, on any number of processes but one.")

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse runs on one rank, and those in which the ranks evaluated one piece of the dataset after the other."""
        groups = [group for group in evaluations(observed) if all(one.indices for one in group)]
        return observed.world_size < 2 or (bool(groups) and all(_is_in_order(group) for group in groups))

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield evaluations that repeat or leave out samples, and those that will."""
        done: set[str] = set()
        for group in evaluations(observed):
            evidence, made = _padded(group), group[0].made
            if evidence and made.loader not in done and not _trims(modules):
                done.add(made.loader)
                yield self._report(modules, group[0].made, "The evaluation counts some samples twice.", evidence)
        for one in (one for passes in passes_by_rank(observed) for one in passes):
            if one.made.loader in done or _is_made_up_for(one, observed):
                continue
            if evidence := _dropped(one, observed.world_size):
                done.add(one.made.loader)
                yield self._report(modules, one.made, "The evaluation leaves samples out.", evidence)
        if not _trims(modules):
            yield from self._foresee(observed, modules)

    def _foresee(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield loaders that were never iterated and whose DistributedSampler will repeat samples."""
        used = {one.made.loader for passes in passes_by_rank(observed) for one in passes}
        for made in observed.by_rank(LoaderMade)[0] if observed.world_size > 1 else []:
            padding = made.num_drawn * observed.world_size - made.length
            if made.loader in used or made.is_shuffled or not made.has_distributed_sampler or made.num_drawn < 0:
                continue
            if padding > 0:
                evidence = (
                    f"the sampler will draw {made.num_drawn} samples on each of {observed.world_size} ranks, "
                    f"{padding} more than the {made.length} that there are"
                )
                yield self._report(modules, made, "The evaluation will count some samples twice.", evidence)

    def _report(self, modules: Sequence[SourceModule], made: LoaderMade, message: str, evidence: str) -> Finding:
        by_framework = mentions(modules, "lightning", "pytorch_lightning", "LightningModule")
        fix = (
            "+ Subset(dataset, range(rank, len(dataset), world_size))  # instead of the DistributedSampler; "
            "or cut what is gathered to len(dataset)"
        )
        if mentions(modules, "Accelerator"):
            fix = "- accelerator.gather(…)\n+ accelerator.gather_for_metrics(…)"
        if "leaves" in message:
            fix = "- drop_last=True\n+ drop_last=False"
        return self.finding(_place(modules, made), message, evidence, fix, Severity.NOTE if by_framework else None)


def _is_in_order(group: Sequence[LoaderPass]) -> bool:
    """Return whether the samples of rank 0, then those of rank 1, …, are those of the dataset in its order."""
    indices = [index for one in group for index in one.indices]
    return indices == sorted(indices)


def _padded(group: Sequence[LoaderPass]) -> str:
    """Return how many samples came twice, where ranks divide one dataset; empty: none did."""
    length = group[0].made.length
    if len(group) < 2 or any(one.made.length != length or not one.indices for one in group):
        return ""
    drawn = sum(one.num_samples for one in group)
    if all(one.made.has_distributed_sampler for one in group):
        padding = f"the {len(group)} ranks evaluated {drawn} samples of a dataset that has {length}"
        return padding if 0 < drawn - length < length else ""
    if len({one.began.content for one in group}) > 1 or max(len(set(one.indices)) for one in group) == length:
        return ""  # hand-made parts, or every rank evaluates everything
    distinct = len({index for one in group for index in one.indices})
    if not 0 < drawn - distinct < distinct or any(len(set(one.indices)) < len(one.indices) // 2 for one in group):
        return ""
    return f"the {len(group)} ranks evaluated {drawn} samples, but only {distinct} different ones, of {length}"


def _dropped(one: LoaderPass, world_size: int) -> str:
    """Return how many samples an evaluation left out because of `drop_last`; empty: none."""
    made = one.made
    if not (one.is_evaluation and one.is_exhausted and made.drops_last) or made.is_iterable or made.num_drawn < 0:
        return ""
    by_sampler = made.length - made.num_drawn * world_size if made.has_distributed_sampler else 0
    lost = max(0, made.num_drawn - one.num_samples) + max(0, by_sampler)
    if not lost:
        return ""
    return f"drop_last: rank {one.rank} evaluated {one.num_samples} samples, and {lost} of {made.length} were left out"


def _is_made_up_for(one: LoaderPass, observed: Observed) -> bool:
    """Return whether other loaders evaluated what this one left out, before the model was trained on."""
    together = [
        other
        for passes in passes_by_rank(observed)
        for other in passes
        if other.is_evaluation and other.began.root == one.began.root and other.began.step == one.began.step
    ]
    if not one.began.root or all(other.made.loader == one.made.loader for other in together):
        return False
    return len({index for other in together for index in other.indices}) >= one.made.length


def _trims(modules: Sequence[SourceModule]) -> bool:
    """Return whether the script cuts what it gathers: by itself, or through Accelerate or the Trainer."""
    if mentions(modules, "gather_for_metrics", "TrainingArguments") or any(map(keeps_each_once, modules)):
        return True
    slices = [node for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.Slice)]
    return any(piece.lower is None and _is_length(piece.upper) for piece in slices)


def _is_length(bound: ast.expr | None) -> bool:
    """Return whether a slice ends at the length of something, or at a name that says so."""
    if isinstance(bound, ast.BinOp) and isinstance(bound.op, ast.Sub):
        # What is left: `len(dataset) - seen`. A sampler's `total_size - len(indices)` is what it adds.
        return isinstance(bound.left, ast.Call) and _is_length(bound.left)
    if isinstance(bound, ast.Call):
        return isinstance(bound.func, ast.Name) and bound.func.id == "len"
    name = bound.id if isinstance(bound, ast.Name) else bound.attr if isinstance(bound, ast.Attribute) else ""
    return any(part in name.lower() for part in ("total", "num_samples", "length", "dataset_size", "n_eval", "n_val"))


def _place(modules: Sequence[SourceModule], made: LoaderMade) -> tuple[str, int]:
    """Return the line to change: that of the sampler, or of Accelerate's gather, or of the loader."""
    module = module_of(modules, made.file)
    statement = statement_at(module, made.line) if module is not None else None
    if module is None or statement is None:
        return made.file, made.line
    if mentions([module], "Accelerator"):
        for call in module.calls_of("gather"):
            return module.place(call.node)
    for call in reversed(list(module.calls_of("DistributedSampler"))):
        same = function_around(module, call.node) is function_around(module, statement)
        if same and call.node.lineno <= made.line and made.has_distributed_sampler:
            return module.place(call.node)
    return made.file, made.line
