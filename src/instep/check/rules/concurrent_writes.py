"""concurrent-writes: several ranks that write one file, and states of all ranks that only one gathers or saves."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.files import FileWritten
from instep.check.rule import Rule
from instep.check.source.cached_files import reads_without_waiting, written_if_missing
from instep.check.source.collective_calls import STATE_COLLECTIVES, is_distributed
from instep.check.source.functions import Function, assignments, call_sites, calls_in, function_around, names_in
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import guard_of_callers, mentions_rank

_SAVES = ("torch.save", "safetensors.torch.save_file", "save_file")
_IF_MISSING = "Every rank writes this file if it does not find it: several at once, or while others read it."
_ONCE = "+ if dist.get_rank() == 0:\n      torch.save(...)"


class ConcurrentWrites(Rule):
    """Compares the files that the ranks wrote, and reads under which condition files are saved."""

    id = "concurrent-writes"
    severity = Severity.WARNING
    effect = "The file may be damaged, or hold the state of whichever rank wrote last; a gathered state hangs."
    watches: ClassVar = {FileWritten: "a file that is written"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield files that several ranks wrote, and shards that not all of their ranks saved."""
        writes: dict[str, dict[int, FileWritten]] = {}
        for rank, files in enumerate(observed.by_rank(FileWritten)):
            for file in files:
                writes.setdefault(file.path, {}).setdefault(rank, file)
        reported: set[tuple[str, int]] = set()
        for path, ranks in writes.items():
            first = next(iter(ranks.values()))
            if len(ranks) > 1 and (first.file, first.line) not in reported:
                reported.add((first.file, first.line))
                yield self._shared(path, ranks, first)
        yield from self._judge_shards(observed, modules, reported)

    def _judge_shards(
        self, observed: Observed, modules: Sequence[SourceModule], reported: set[tuple[str, int]]
    ) -> Iterable[Finding]:
        savers: dict[tuple[str, int], dict[int, FileWritten]] = {}
        for rank, files in enumerate(observed.by_rank(FileWritten)):
            for file in files:
                if file.num_shards > 1:
                    savers.setdefault((file.file, file.line), {}).setdefault(rank, file)
        for place, ranks in savers.items():
            first = next(iter(ranks.values()))
            if len(ranks) < first.num_shards and place not in reported:
                who = f"only rank {', '.join(map(str, sorted(ranks)))} saved"
                evidence = f"{who} at this line, to {first.path}, and its tensors are divided over {first.num_shards}"
                parts = [module.place(call.node) for module in modules for call in module.calls_of("to_local")]
                yield self._shards((parts or [place])[0], f"{evidence} ranks", Severity.ERROR)

    def _shards(self, place: tuple[str, int], evidence: str, severity: Severity) -> Finding:
        shards = self.finding(
            place,
            "The saved state holds one rank's shards only: those of the other ranks are lost.",
            evidence,
            "+ options = StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
            "+ state = get_model_state_dict(model, options=options)  # on all ranks; then save under `if rank == 0`",
            severity,
        )
        return replace(
            shards,
            effect="The checkpoint lacks most of the weights, or of the optimizer's state, and cannot be resumed from.",
        )

    def _shared(self, path: str, ranks: dict[int, FileWritten], first: FileWritten) -> Finding:
        severity = Severity.WARNING
        if all(file.appends for file in ranks.values()):
            severity = Severity.NOTE
        elif first.function == "torch.save":
            severity = Severity.ERROR
        return self.finding(
            (first.file, first.line),
            f"{len(ranks)} ranks write the same file.",
            f"ranks {', '.join(map(str, sorted(ranks)))} wrote {path} by {first.function}",
            _ONCE,
            severity,
        )

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse lines whose writes were seen, by one rank or to different files; who comes first is chance."""
        if finding.message == _IF_MISSING:
            return observed.world_size < 2
        return observed.has_at(FileWritten, finding.place)

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield saves that all ranks make, or one on each node, and states that only one rank gathers."""
        if not is_distributed(module):
            return
        for call in module.calls_of(*_SAVES):
            yield from self._read_save(module, call)
        for call in written_if_missing(module):
            yield self.finding(
                module.place(call.node),
                _IF_MISSING,
                f"`{module.line(call.node.lineno)}`",
                "Write it on rank 0 only, and let the others wait: dist.barrier() before they read.",
            )
        for read, write in reads_without_waiting(module):
            yield self.finding(
                module.place(read.node),
                "All ranks read a file that rank 0 writes, and nothing keeps them from reading before it is written.",
                f"`{module.line(read.node.lineno)}`; line {write.node.lineno}: `{module.line(write.node.lineno)}`",
                "+ dist.barrier()  # after rank 0 has written the file",
            )
        unread = {id(call.node) for call in _saves_shards(module)}
        for call in module.calls:
            if id(call.node) in unread:
                yield self._shards(module.place(call.node), f"`{module.line(call.node.lineno)}`", Severity.WARNING)
            guard = guard_of_callers(module, call.node) if _gathers(module, call) else None
            if guard is not None and guard.is_main:
                yield self.finding(
                    module.place(call.node),
                    "The state is gathered from all ranks, but only one rank calls it.",
                    f"`{module.line(call.node.lineno)}` under `{ast.unparse(guard.node).splitlines()[0]}`",
                    "Gather the state on all ranks, then save it under `if rank == 0`.",
                    Severity.ERROR,
                )

    def _read_save(self, module: SourceModule, call: Call) -> Iterable[Finding]:
        path = call.argument("f" if call.last == "save" else "filename", 1)
        guard = guard_of_callers(module, call.node)
        if (
            path is None
            or _differs_by_rank(module, path)
            or _is_buffer(module, path)
            or _called_elsewhere(module, call)
        ):
            return
        if guard is None:
            message, fix = "Every rank saves to the same path.", _ONCE
        elif guard.is_local and guard.is_main:
            message = "Rank 0 of each node saves to the same path: on a shared file system they collide."
            fix = "- if local_rank == 0:\n+ if rank == 0:"
        else:
            return
        yield self.finding(module.place(call.node), message, f"`{module.line(call.node.lineno)}`", fix)


def _called_elsewhere(module: SourceModule, call: Call) -> bool:
    """Return whether a call is in a function that other files call, under conditions that are not known here."""
    function = function_around(module, call.node)
    return isinstance(function, Function) and not call_sites(module, function)


def _gathers(module: SourceModule, call: Call) -> bool:
    """Return whether a call needs all ranks: a gathered state, or the state_dict of a module that FSDP1 shards.

    FSDP2's state_dict does not: it returns this rank's shards.
    """
    if call.last in STATE_COLLECTIVES or call.name.startswith("torch.distributed.checkpoint.save"):
        return True
    if call.last != "state_dict" or not isinstance(call.node.func, ast.Attribute):
        return False
    return ast.unparse(call.node.func.value) in _sharded_names(module)


def _sharded_names(module: SourceModule) -> set[str]:
    """Return the variables that hold a model which FSDP1 shards."""
    names: set[str] = set()
    for call in module.calls_of("FullyShardedDataParallel"):
        statement = next((outer for outer in module.around(call.node) if isinstance(outer, ast.Assign)), None)
        names |= {ast.unparse(target) for target in statement.targets} if statement is not None else set()
    return names


def _saves_shards(module: SourceModule) -> Iterable[Call]:
    """Yield the saves of one rank whose object is a state_dict of what FSDP2 shards, in files that gather nothing."""
    is_fsdp2 = any(True for _ in module.calls_of("fully_shard"))
    if not is_fsdp2 or any(True for _ in module.calls_of(*STATE_COLLECTIVES)):
        return
    for call in module.calls_of("torch.save"):
        guard, saved = guard_of_callers(module, call.node), call.argument("obj", 0)
        if guard is None or not guard.is_main or saved is None:
            continue
        scope, names = function_around(module, call.node), names_in(saved)
        sources = [saved, *(value for set_names, value in assignments(scope) if set_names & names)]
        calls = [inner for source in sources for inner in calls_in(module, source)]
        is_local = any(inner.last == "to_local" for inner in calls_in(module, scope)) and any(
            inner.last == "to_local" or names & names_in(inner.node) for inner in calls_in(module, scope)
        )
        if is_local or any(inner.last == "state_dict" and _is_sharded_state(inner) for inner in calls):
            yield call


def _is_sharded_state(call: Call) -> bool:
    """Return whether a state_dict is one of a model or of its optimizer, by its owner's name."""
    owner = call.name.removesuffix(".state_dict").rpartition(".")[2].lower()
    return not any(word in owner for word in ("sched", "scaler", "sampler", "loader", "ema", "stateful"))


def _differs_by_rank(module: SourceModule, path: ast.expr) -> bool:
    if mentions_rank(path):
        return True
    names = {node.id for node in ast.walk(path) if isinstance(node, ast.Name)}
    return any(names & set_names and mentions_rank(value) for set_names, value in assignments(module.tree))


def _is_buffer(module: SourceModule, path: ast.expr) -> bool:
    names = {node.id for node in ast.walk(path) if isinstance(node, ast.Name)}
    return any("BytesIO" in ast.unparse(value) for set_names, value in assignments(module.tree) if names & set_names)
