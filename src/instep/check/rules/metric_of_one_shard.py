"""Rule metric-of-one-shard: what is reported is the metric of one rank's samples, or the mean of the ranks' ratios."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from instep.check.evaluated_metrics import evaluated_metrics
from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.passes import LoaderPass, evaluations, is_data_parallel, is_divided
from instep.check.records.data import BatchYielded, EvaluationSeen, LoadersEnded, PassBegan
from instep.check.records.run import Ended
from instep.check.rule import Rule
from instep.check.source.lightning_logs import local_logs
from instep.check.source.local_galleries import local_galleries
from instep.check.source.loops import function_around, module_of, statement_at, within
from instep.check.source.module import Call, SourceModule
from instep.check.source.names import calls_of, mentions
from instep.check.source.shard_metrics import shard_metrics
from instep.check.source.whole_metrics import averaged_metrics, named_means

_REPORTS = ("print", "info", "log", "log_metrics", "add_scalar", "write", "report", "append")
_LOGGED = "Lightning logs the metric of each rank's own batches, and reports that of rank 0."
_OF_SHARD = "`{}` is that of the samples which this rank evaluated."
_ENDINGS = (_LOGGED, _OF_SHARD.format("").removeprefix("``"))
_REDUCES = ("all_reduce", "reduce")


class MetricOfOneShard(Rule):
    """Finds evaluations that ranks divide without bringing their results together."""

    id = "metric-of-one-shard"
    severity = Severity.WARNING
    effect = "The number is that of a part of the data: noisier than it looks, and different on each rank."
    watches: ClassVar[dict[type[Observation], str]] = {EvaluationSeen: "an evaluation to its end"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield evaluations of parts after which no collective combines anything."""
        if not is_data_parallel(observed):
            return
        yield from self._values(observed, modules)
        done: set[str] = set()
        for group in evaluations(observed):
            made = group[0].made
            if made.loader in done or not is_divided(group) or _was_reduced(observed, group):
                continue
            if not all(_is_followed(observed, one) for one in group):
                continue
            done.add(made.loader)
            counts = " and ".join(str(one.num_samples) for one in group[:8])
            yield self.finding(
                _place(modules, group[0]),
                "The metric is that of one rank's part of the data: nothing combines the parts.",
                f"the ranks evaluated {counts} samples, and no collective was called before the next batch",
                "+ dist.all_reduce(counts)  # sums of hits and of samples; divide afterwards",
                Severity.ERROR if _is_reported(modules, group[0]) else None,
            )

    def _values(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        for metric in evaluated_metrics(observed, modules):
            if metric.is_reported:
                yield self.finding(
                    metric.place,
                    f"`{metric.path.text}` is reported, and it is that of the rank's own samples.",
                    f"after the evaluation it was another one on each rank ({metric.path.shown})",
                    "+ dist.all_reduce(sums)  # of hits and of samples, on all ranks; divide afterwards",
                )

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse logs of a run in one process, and of evaluations in which every rank went through everything."""
        seen = evaluations(observed)
        is_undivided = bool(seen) and not any(is_divided(group) for group in seen)
        return observed.world_size < 2 or (is_undivided and finding.message.endswith(_ENDINGS))

    def _read_logs(self, module: SourceModule) -> Iterable[Finding]:
        calls = list(local_logs(module))
        if calls:
            more = f", and {len(calls) - 1} more places" if len(calls) > 1 else ""
            yield self.finding(
                module.place(calls[0].node),
                _LOGGED,
                f"`{module.line(calls[0].node.lineno)}`{more}",
                "self.log(..., sync_dist=True)  # or log a torchmetrics object",
            )

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield ratios that are averaged over ranks, in functions that do not train, and what Lightning logs of one."""
        yield from self._read_logs(module)
        for metric in shard_metrics(module):
            yield self.finding(
                module.place(metric.node),
                _OF_SHARD.format(metric.last),
                f"`{module.line(metric.node.lineno)}`: no collective mentions what it is computed from",
                "+ dist.all_gather_object(parts, (predictions, targets))  # then compute the metric once, of all",
            )
        for comparison, gallery in local_galleries(module):
            yield self.finding(
                module.place(comparison),
                f"The nearest samples are looked for in `{gallery}`, which has those of this rank only.",
                f"`{module.line(comparison.lineno)}`: no collective mentions `{gallery}`, and the data is divided",
                "Gather the features and labels that are searched from all ranks; divide only the queries.",
            )
        for log, name in named_means(module):
            yield self.finding(
                module.place(log.node),
                f"`{name}` of each rank's samples is averaged, which is not that of all samples.",
                f"`{module.line(log.node.lineno)}` has sync_dist=True",
                "Log a torchmetrics object, which sums its parts; or all_gather the predictions first.",
            )
        for averaged in averaged_metrics(module):
            line = averaged.metric.node.lineno
            yield self.finding(
                module.place(averaged.node),
                f"`{averaged.metric.last}` of each rank's samples is averaged, which is not that of all samples.",
                f"line {line}: {module.line(line)}",
                "+ dist.all_gather_object(parts, (predictions, targets))  # then compute the metric once, of all",
            )
        for call in module.calls_of(*_REDUCES):
            function = function_around(module, call.node)
            if function is None or any(inner.last == "backward" for inner in _calls_in(module, function)):
                continue
            name = call.node.args[0].id if call.node.args and isinstance(call.node.args[0], ast.Name) else ""
            ratio = _ratio(function, name, call.node.lineno) if name else None
            if ratio is not None and _divides_by_ranks(function, name, call):
                yield self.finding(
                    module.place(call.node),
                    f"`{name}` is the mean of the ranks' ratios, not the ratio of all samples.",
                    f"line {ratio.lineno}: {module.line(ratio.lineno)}",
                    "+ dist.all_reduce(counts)  # sum numerators and denominators, and divide afterwards",
                )


def _was_reduced(observed: Observed, group: Sequence[LoaderPass]) -> bool:
    """Return whether any rank called a collective from the evaluation's first batch until the next loader's batch."""
    return any(_reductions_after(observed, one) > one.began.reductions for one in group)


def _is_followed(observed: Observed, one: LoaderPass) -> bool:
    """Return whether the rank came as far as to its next batch, or to its end, and not to a failure before."""
    assert one.ended is not None
    later = any(batch.step > one.ended.step for batch in observed.by_rank(BatchYielded)[one.rank])
    return later or any(end.how == "complete" for end in observed.by_rank(Ended)[one.rank])


def _reductions_after(observed: Observed, one: LoaderPass) -> int:
    """Return the rank's count of collectives when it went on to another loader, or at its end."""
    assert one.ended is not None
    records: list[PassBegan | BatchYielded] = [
        *observed.by_rank(PassBegan)[one.rank],
        *observed.by_rank(BatchYielded)[one.rank],
    ]
    later = [
        record.reductions
        for record in records
        if record.step > one.ended.step and record.reductions >= one.ended.reductions
    ]
    ends = [record.reductions for record in observed.by_rank(LoadersEnded)[one.rank]]
    return min(later) if later else max([*ends, one.ended.reductions])


def _calls_in(module: SourceModule, node: ast.AST) -> list[Call]:
    inside = set(within(node))
    return [call for call in module.calls if call.node in inside]


def _reports_after(module: SourceModule, node: ast.AST, line: int) -> Iterator[Call]:
    for call in _calls_in(module, node):
        if call.node.lineno > line and call.last in _REPORTS:
            yield call


def _report_of(modules: Sequence[SourceModule], one: LoaderPass) -> tuple[str, int] | None:
    """Return the line that reports the metric: after the loop over batches, or after the call of its function."""
    module = module_of(modules, one.began.file)
    statement = statement_at(module, one.began.line) if module is not None else None
    if module is None or statement is None:
        return None
    function = function_around(module, statement)
    for report in _reports_after(module, function or module.tree, statement.end_lineno or one.began.line):
        return module.place(report.node)
    for other, call in calls_of(modules, function.name) if function is not None else ():
        caller = function_around(other, call.node) or other.tree
        for report in _reports_after(other, caller, call.node.end_lineno or call.node.lineno):
            return other.place(report.node)
    return None


def _is_reported(modules: Sequence[SourceModule], one: LoaderPass) -> bool:
    """Return whether the script itself prints the metric: a framework may combine the parts in a way of its own."""
    return not mentions(modules, "LightningModule", "TrainingArguments", "torchmetrics") and (
        _report_of(modules, one) is not None
    )


def _place(modules: Sequence[SourceModule], one: LoaderPass) -> tuple[str, int]:
    return _report_of(modules, one) or (one.began.file, one.began.line)


def _ratio(function: ast.AST, name: str, line: int) -> ast.stmt | None:
    """Return the last assignment before a line that makes `name` a ratio, directly or from names that are ratios."""
    ratios: set[str] = set()
    last: ast.stmt | None = None
    for node, target, value in sorted(_settings(function), key=lambda one: one[0].lineno):
        if node.lineno >= line:
            continue
        used = {inner.id for inner in ast.walk(value) if isinstance(inner, ast.Name)}
        if any(_is_ratio(inner) for inner in ast.walk(value)) or used & ratios:
            ratios.add(target)
            last = node if target == name else last
    return last


def _settings(function: ast.AST) -> Iterator[tuple[ast.stmt, str, ast.expr]]:
    """Yield the statements that set a variable or append to it, with its name and the value."""
    for node in within(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node, node.targets[0].id, node.value
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
            called = node.value.func
            if isinstance(called, ast.Attribute) and called.attr == "append" and isinstance(called.value, ast.Name):
                yield node, called.value.id, node.value.args[0]


def _is_ratio(node: ast.AST) -> bool:
    """Return whether a node divides by something that was counted, not by a constant or a length."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return False
    divisor = ast.unparse(node.right)
    return not isinstance(node.right, ast.Constant) and "len(" not in divisor and "world" not in divisor


def _divides_by_ranks(function: ast.AST, name: str, call: Call) -> bool:
    """Return whether the sum over ranks becomes a mean: by its operation, or by a division afterwards."""
    if "AVG" in ast.unparse(call.node):
        return True
    for node in within(function):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            text = ast.unparse(node)
            if node.lineno > call.node.lineno and name in text and ("world" in text or "num_processes" in text):
                return True
    return False
