"""Rule file-order-differs: ranks list files in different orders, so that the same index means different samples."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.passes import matched_passes
from instep.check.records.data import PassBegan
from instep.check.rule import Rule
from instep.check.source.loops import function_around
from instep.check.source.module import Call, SourceModule
from instep.check.source.names import mentions

_LISTINGS = {"os.listdir", "os.scandir", "os.walk", "glob.glob", "glob.iglob"}
_METHODS = {"iterdir", "glob", "rglob"}
_ORDER_FREE = {"sorted", "len", "set", "frozenset", "any", "all", "max", "min", "sum", "natsorted"}
_DISTRIBUTED = ("DistributedSampler", "DistributedDataParallel", "fully_shard", "Accelerator", "get_rank")
_CHECKPOINTS = ("ckpt", "checkpoint", "save", "resume", "weights", "model", "clean", "remove", "log", "shard_out")


class FileOrderDiffers(Rule):
    """Finds datasets that hold the same things in another order on each rank, and listings that nobody sorts."""

    id = "file-order-differs"
    severity = Severity.ERROR
    effect = (
        "Ranks take their shares from different lists: some samples are seen several times in an epoch, others never."
    )
    watches: ClassVar[dict[type[Observation], str]] = {PassBegan: "a DataLoader"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield the first dataset whose order differs between ranks that divide it by index."""
        for group in matched_passes(observed):
            orders = {one.began.content for one in group}
            contents = {one.began.sorted_content for one in group}
            if len(orders) < 2 or len(contents) > 1 or "" in orders:
                continue
            made = group[0].made
            if not made.has_distributed_sampler and made.sampler != "BatchSamplerShard":
                continue
            listings = [place for module in modules for place in self._listings(module)]
            yield self.finding(
                listings[0][0].place(listings[0][1].node) if listings else group[0].place,
                "The dataset has another order on each rank.",
                f"the {len(group)} ranks hold the same {made.length} samples of {made.dataset}, {len(orders)} orders",
                "- os.listdir(folder)\n+ sorted(os.listdir(folder))  # the same order on all ranks",
            )
            return

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield listings of files that become a dataset without being sorted."""
        if not mentions([module], *_DISTRIBUTED):
            return
        for _, call in self._listings(module):
            yield self.finding(
                module.place(call.node),
                "Files are listed in an order that differs between machines, and are not sorted.",
                module.line(call.node.lineno),
                f"- {ast.unparse(call.node)}\n+ sorted({ast.unparse(call.node)})",
                Severity.WARNING,
            )

    def _listings(self, module: SourceModule) -> Iterator[tuple[SourceModule, Call]]:
        for call in module.calls:
            if _is_listing(call) and _feeds_data(module, call) and not _is_sorted(module, call):
                yield module, call


def _is_listing(call: Call) -> bool:
    by_method = isinstance(call.node.func, ast.Attribute) and call.node.func.attr in _METHODS
    return call.name in _LISTINGS or by_method


def _feeds_data(module: SourceModule, call: Call) -> bool:
    """Return whether the listing is in a Dataset's class, or in a function or statement that speaks of data."""
    for outer in module.around(call.node):
        if isinstance(outer, ast.ClassDef):
            return any("Dataset" in ast.unparse(base) for base in outer.bases)
    function = function_around(module, call.node)
    text = f"{function.name if function is not None else ''} {module.line(call.node.lineno)}".lower()
    if any(word in text for word in _CHECKPOINTS):
        return False
    return any(word in text for word in ("data", "file", "path", "sample", "image", "train", "shard"))


def _is_sorted(module: SourceModule, call: Call) -> bool:
    """Return whether the order does not matter: the list is sorted at once or later, or only counted or searched."""
    for outer in module.around(call.node):
        if isinstance(outer, ast.Call) and module.name_of(outer.func).rpartition(".")[2] in _ORDER_FREE:
            return True
        if isinstance(outer, ast.Compare):
            return True
        if isinstance(outer, ast.stmt):
            break
    function: ast.AST = function_around(module, call.node) or module.tree
    return any(
        isinstance(node, ast.Call) and module.name_of(node.func).rpartition(".")[2] in ("sort", "sorted", "natsorted")
        for node in ast.walk(function)
    )
