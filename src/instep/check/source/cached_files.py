"""Where ranks share a file without waiting for each other: all may write it, or read what one rank still writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import (
    Function,
    assignments,
    call_sites,
    calls_below,
    calls_in,
    function_around,
    functions_named,
    is_imported,
)
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import guard_of_callers, mentions_rank, rank_guard
from instep.check.source.reaching import syncs

_EXISTS = ("exists", "isfile", "is_file", "isdir", "is_dir")
_WRITES = frozenset(
    (
        *("save", "savez", "savez_compressed", "savetxt", "dump", "to_csv", "to_parquet", "to_pickle", "write_text"),
        *("write_bytes", "save_to_disk", "urlretrieve", "extractall", "save_file", "to_json", "tofile"),
    )
)
_READS = frozenset(
    (
        *("load", "loadtxt", "read_csv", "read_parquet", "read_pickle", "read_text", "read_bytes", "load_from_disk"),
        *("memmap", "fromfile", "load_file", "read_json", "safe_open", "genfromtxt", "open"),
    )
)
_ORDERS = re.compile(r"lock|_first|first_|rank_zero_first|main_process_first", re.IGNORECASE)
_WAITS = re.compile(r"barrier|wait|sync|DistributedDataParallel|fully_shard|prepare", re.IGNORECASE)
_PATH = re.compile(r"path|file|dir|cache|ckpt|checkpoint|fname|out|name", re.IGNORECASE)


def written_if_missing(module: SourceModule) -> Iterator[Call]:
    """Yield the writes that every rank makes if it does not find the file."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.If) or not _asks_if_missing(module, node.test) or mentions_rank(node.test):
            continue
        writes = [call for statement in node.body for call in calls_below(module, statement, 1) if _writes(call)]
        if not writes or _replaces(module, node) or guard_of_callers(module, node) is not None:
            continue
        if not _is_ordered(module, node) and not _differs_by_rank(module, node.test):
            inside = [call for call in writes if call.node in set(ast.walk(node))]
            yield (inside or writes)[0]


def reads_without_waiting(module: SourceModule) -> Iterator[tuple[Call, Call]]:
    """Yield the reads of all ranks that nothing keeps behind the write of the first rank, with that write."""
    for write in module.calls:
        guard = rank_guard(module, write.node)
        scope = function_around(module, write.node)
        if guard is None or not guard.is_main or not isinstance(scope, Function) or not _puts(module, write):
            continue
        paths = _paths(write)
        later = [call for call in calls_in(module, scope) if call.node.lineno > (write.node.end_lineno or 0)]
        waits = [call.node.lineno for call in later if is_collective(call) or syncs(call) or _WAITS.search(call.name)]
        for read in later:
            if any(line < read.node.lineno for line in waits):
                break
            if rank_guard(module, read.node) is None and paths & _paths(read) and _gets(module, read):
                yield read, write
                break


def _asks_if_missing(module: SourceModule, test: ast.expr) -> bool:
    return any(
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.Not)
        and any(call.last in _EXISTS for call in calls_in(module, node.operand))
        for node in ast.walk(test)
    )


def _writes(call: Call) -> bool:
    mode = call.argument("mode", 1)
    opens = call.last == "open" and isinstance(mode, ast.Constant) and str(mode.value)[:1] in ("w", "x")
    return opens or (call.last in _WRITES and not call.name.startswith("self."))


def _replaces(module: SourceModule, node: ast.If) -> bool:
    """Return whether the file appears at once: it is written under another name, and renamed."""
    return any(
        call.last in ("replace", "rename", "renames", "move", "mkstemp", "NamedTemporaryFile")
        for statement in node.body
        for call in calls_below(module, statement, 1)
    )


def _is_ordered(module: SourceModule, node: ast.AST, depth: int = 2) -> bool:
    """Return whether ranks come here one after the other: under a lock, or by barriers of some ranks."""
    for outer in module.around(node):
        if isinstance(outer, ast.With) and any(_ORDERS.search(ast.unparse(item)) for item in outer.items):
            return True
    scope = function_around(module, node)
    barriers = [call for call in calls_in(module, scope) if "barrier" in call.last or "wait_for" in call.last]
    if any(rank_guard(module, call.node) is not None for call in barriers):
        return True
    sites = call_sites(module, scope) if isinstance(scope, Function) and depth else []
    return any(_is_ordered(module, site.node, depth - 1) for site in sites)


def _differs_by_rank(module: SourceModule, test: ast.expr) -> bool:
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    for targets, value in assignments(module.tree):
        if names & targets and mentions_rank(value):
            return True
    parameters = [
        site.node
        for function in (one for ones in module.functions.values() for one in ones)
        if names & {item.arg for item in function.args.args} and test in set(ast.walk(function))
        for site in call_sites(module, function)
    ]
    return any(mentions_rank(argument) for call in parameters for argument in call.args)


def _puts(module: SourceModule, call: Call) -> bool:
    """Return whether a call writes a file, itself or in a function of this file."""
    if _writes(call):
        return True
    own = [] if is_imported(module, call) else functions_named(module, call.last)
    return any(_writes(inner) for function in own for inner in calls_below(module, function, 1))


def _gets(module: SourceModule, call: Call) -> bool:
    """Return whether a call reads a file, itself or in a function or class of this file."""
    if call.last in _READS and not _writes(call):
        return True
    own: list[ast.AST] = [] if is_imported(module, call) else [*functions_named(module, call.last)]
    own += [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef) and node.name == call.last]
    return any(inner.last in _READS and not _writes(inner) for one in own for inner in calls_in(module, one))


def _paths(call: Call) -> set[str]:
    """Return the arguments of a call that may be a path, as they are written; of `path.write_text()`, its owner."""
    owner = [call.node.func.value] if isinstance(call.node.func, ast.Attribute) else []
    given = [*call.node.args, *(keyword.value for keyword in call.node.keywords), *owner]
    paths = set()
    for value in given:
        text = ast.unparse(value)
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str) and "." in value.value
        if is_text or (isinstance(value, ast.Name | ast.Attribute | ast.BinOp | ast.JoinedStr) and _PATH.search(text)):
            paths.add(text)
        elif isinstance(value, ast.Call) and value.args and ast.unparse(value.func) in ("open", "str", "Path"):
            paths.add(ast.unparse(value.args[0]))
    return paths
