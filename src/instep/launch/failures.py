"""What failed, and what failed first. Pure: from exceptions and exit codes to records, order and text.

[Note: The first failure]
When one rank fails, the others soon fail too, because they lose a peer. This module decides which one is to blame. A
failure that merely reports a lost peer is a *consequence* and comes after every other. Among the rest the earliest
comes first, by the time in nanoseconds that the failing rank recorded. A rank that was stopped because another had
failed has not failed itself. The nodes' clocks differ, so their times are corrected first ([Note: One time for all
nodes] in clock_offset.py). Failures closer together than the uncertainty of the clocks are ordered by the kind of error
(one that the user's code raised before one of the environment), then by the step that was reached.
"""

import dataclasses
import math
import os
import re
import signal
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from instep.core.errors import (
    EXIT_ENVIRONMENT,
    EXIT_INTERRUPTED,
    EXIT_SPEC,
    EXIT_USER,
    CollectiveMismatch,
    FailureRecord,
    InstepError,
    PeerLost,
    RanksFailed,
)
from instep.core.frames import PACKAGE, is_users
from instep.world.device import device_backends

_LOST_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_PEER = re.compile(
    r"connection (closed by peer|reset|refused|timed out|was (likely )?closed)|broken pipe|socket (timeout|closed)"
    r"|no route to host|network is unreachable"
    r"|timed out (waiting|after)|wait timeout|failed to (recv|send)|connectFullMesh failed"
    r"|application timeout caused pair closure|failed to pass monitoredBarrier"
    r"|\bPeerLost: "  # through C++, our own becomes a RuntimeError
    rf"|({'|'.join(device_backends())}).*(remote|abort|timeout)|remote process exited|watchdog caught collective",
    re.IGNORECASE | re.DOTALL,
)
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_MEMORY_ERROR = re.compile(r"(\w+\.)*(MemoryError|OutOfMemoryError)\b")
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory", re.IGNORECASE)

_SIGNAL_HINTS = {
    signal.SIGKILL: "out of memory, or someone killed it",
    signal.SIGTERM: "someone ended it",
    signal.SIGSEGV: "a crash in native code; its log may hold the Python stack",
    signal.SIGABRT: "native code aborted; its log says why",
    signal.SIGBUS: "access to missing memory; /dev/shm may be full",
}


def failure_of_exception(error: BaseException, rank: int, time_ns: int, log: str) -> FailureRecord:
    """Return the record of an exception that ended a rank."""
    exit_code, consequence = _classify(error)
    return FailureRecord(
        rank=rank,
        time_ns=time_ns,
        summary=_summary(error),
        traceback=users_traceback(error),
        exit_code=exit_code,
        consequence=consequence,
        final=exit_code == EXIT_SPEC or (isinstance(error, InstepError) and exit_code == EXIT_USER),
        log=log,
        collective=_called(error) if isinstance(error, CollectiveMismatch) else "",
        out_of_memory=is_out_of_memory(error),
    )


def _called(error: CollectiveMismatch) -> str:
    """Return which collective a rank called, and the user's line, if it was the user who called it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    at = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
    return error.called + at


def failure_of_exit(rank: int, exit_code: int, time_ns: int, log: str) -> FailureRecord:
    """Return the record of a rank whose process ended without an exception; a negative exit code is a signal."""
    if exit_code < 0:
        try:
            number = signal.Signals(-exit_code)
            name, hint = number.name, _SIGNAL_HINTS.get(number, "")
        except ValueError:
            name, hint = f"signal {-exit_code}", ""
        summary = f"killed ({name})" + (f": {hint}" if hint else "")
        code = EXIT_ENVIRONMENT
    else:
        summary = f"ended with exit code {exit_code} and no exception (os._exit, or native code)"
        code = EXIT_USER
    return FailureRecord(rank=rank, time_ns=time_ns, summary=summary, exit_code=code, log=log)


def environment_failure(
    summary: str, time_ns: int, rank: int = 0, *, names_ranks: bool = True, **fields: Any
) -> FailureRecord:
    """Return the record of a failure of the environment; by default, of one that is no rank's own."""
    return FailureRecord(
        rank=rank, time_ns=time_ns, summary=summary, exit_code=EXIT_ENVIRONMENT, names_ranks=names_ranks, **fields
    )


def order_failures(failures: Iterable[FailureRecord]) -> list[FailureRecord]:
    """Return the failures, the first cause first; see [Note: The first failure]."""
    ordered = sorted(failures, key=lambda failure: (failure.consequence, failure.time_ns, failure.rank))
    if not ordered:
        return []
    if ordered[0].collective:
        return _odd_one_out(ordered)
    earliest = ordered[0]
    tied = [failure for failure in ordered if failure is earliest or _may_be_as_early(failure, earliest)]
    first = min(tied, key=_tie_order) if len(tied) > 1 else earliest
    return [first, *(failure for failure in ordered if failure is not first)]


def _odd_one_out(ordered: list[FailureRecord]) -> list[FailureRecord]:
    """Order failures of ranks that called different collectives: those who did what the fewest did come first."""
    groups: dict[str, list[FailureRecord]] = {}
    for failure in ordered:
        if failure.collective:
            groups.setdefault(failure.collective, []).append(failure)
    # Of equally large groups, that whose call is in the user's code; rank 0 is usually right.
    size = {text: (len(group), " at " not in text, any(f.rank == 0 for f in group)) for text, group in groups.items()}
    by_size = sorted(groups, key=lambda text: size[text])
    parts = []
    for text in by_size:
        ranks = sorted(failure.rank for failure in groups[text])
        parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} called {text}")
    if len(parts) == 1:  # the others were ended before they could say it
        return ordered
    sentence = (
        f"{parts[0]}, while {' and '.join(parts[1:])}. All ranks must call the same collectives in the same order."
    )
    first = dataclasses.replace(groups[by_size[0]][0], summary=sentence, names_ranks=True, traceback="")
    return [first, *(dataclasses.replace(f, consequence=True) for f in ordered if f.rank != first.rank)]


def _may_be_as_early(failure: FailureRecord, earliest: FailureRecord) -> bool:
    """Return whether a failure on another node is later than the earliest only within the uncertainty of the clocks."""
    return (
        failure.host != earliest.host
        and failure.consequence == earliest.consequence
        and failure.time_ns - earliest.time_ns <= failure.doubt_ns + earliest.doubt_ns
    )


def _tie_order(failure: FailureRecord) -> tuple[bool, float, int, int]:
    is_environment = failure.exit_code == EXIT_ENVIRONMENT
    step = math.inf if failure.step is None else failure.step
    return is_environment, step, failure.time_ns, failure.rank


def complete_failures(
    records: Sequence[FailureRecord], exits: Mapping[int, tuple[int, int]], logs: Mapping[int, str]
) -> list[FailureRecord]:
    """Add the ranks without a record, of which only (exit code, whole second) is known, and order all."""
    recorded = {record.rank for record in records}
    unrecorded = [
        # Only the second is known: at its end, a rank is never blamed before one that recorded its time.
        failure_of_exit(rank, code, (second + 1) * 10**9 - 1, logs.get(rank, ""))
        for rank, (code, second) in exits.items()
        if rank not in recorded and code != 0
    ]
    stopped = f"({signal.SIGTERM.name})"
    blamed = [failure for failure in unrecorded if stopped not in failure.summary]
    return order_failures([*records, *(blamed if blamed or records else unrecorded)])


def describe(failed: RanksFailed) -> str:
    """Return the report for the user: the first failure in full, then a line for each other rank."""
    first = failed.first
    others = [f for f in failed.failures[1:] if f.summary != first.summary]
    if first.names_ranks:  # its sentence also says where the others were
        others = [f for f in others if not f.consequence]
    if not first.traceback and first.exit_code == EXIT_SPEC:  # the message is not about a rank
        return f"instep: {first.summary}"
    alike = sorted(f.rank for f in failed.failures if f.summary == first.summary)
    who = first.who if len(alike) == 1 else "ranks " + ", ".join(map(str, alike))
    lines = [first.line if first.names_ranks else f"{who}: {first.summary}"]
    if first.traceback:
        lines = [f"{who} failed{' first' if others else ''}:", first.traceback.rstrip()]
    lines += [f"{f.who}: {f.summary}{' (lost its peer)' if f.consequence else ''}" for f in others]
    if first.log:
        lines.append(f"Output of {first.who}: {first.log}")
    return "\n".join(lines)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, of the host or of a device, ran out."""
    names = {kind.__name__ for kind in type(error).__mro__}  # by name: this file imports no torch
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names:
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def ran_out_of_memory(failed: RanksFailed) -> bool:
    """Return whether ranks failed because memory ran out; a rank that was killed is taken for one of those."""
    own = [failure.summary for failure in failed.failures if not failure.consequence]
    return any(_OUT_OF_MEMORY.search(text) or _MEMORY_ERROR.match(text) for text in own)


def _classify(error: BaseException) -> tuple[int, bool]:
    names = {kind.__name__ for kind in type(error).__mro__}  # by name: this file imports no torch
    text = str(error)
    if isinstance(error, InstepError):
        return error.exit_code, isinstance(error, PeerLost)
    if isinstance(error, SystemExit):
        # argparse exits with 2 if the command line is wrong, and so does instep.
        return (EXIT_SPEC if error.code == EXIT_SPEC else EXIT_USER), False
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, False
    if is_out_of_memory(error):
        return EXIT_ENVIRONMENT, False
    if isinstance(error, RuntimeError):
        if _PORT_TAKEN.search(text):
            return EXIT_ENVIRONMENT, False
        if names & _LOST_PEER_TYPES or _LOST_PEER.search(text):
            return EXIT_ENVIRONMENT, True
    return EXIT_USER, False


def _summary(error: BaseException) -> str:
    if isinstance(error, InstepError):
        return str(error)  # a sentence for the user; the class name would add nothing
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return f"sys.exit({error.code})"
    only = traceback.format_exception_only(error)
    text = only[-1] if isinstance(error, SyntaxError) else only[0]
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    # The module of a qualified name (torch.distributed.DistBackendError) adds nothing.
    line = line.removeprefix(f"{type(error).__module__}.")
    return line if len(line) <= 300 else line[:297] + "..."


def users_traceback(error: BaseException) -> str:
    """Return the traceback, if there is user code in it only that; empty if the message is enough."""
    if isinstance(error, InstepError | SystemExit):
        return ""
    exception = traceback.TracebackException.from_exception(error)
    _trim(exception)
    return "".join(exception.format())


def _trim(exception: traceback.TracebackException) -> None:
    frames = list(exception.stack)
    start = next((i for i, frame in enumerate(frames) if is_users(frame.filename)), None)
    if start is None:  # no frame of the user: at least leave out the launcher's
        start = next((i for i, frame in enumerate(frames) if not _is_launchers(frame.filename)), len(frames))
        kept = frames[start:]
    else:
        kept = [frame for frame in frames[start:] if not _is_machinery(frame.filename)]
    exception.stack = traceback.StackSummary.from_list(kept)
    for other in filter(None, (exception.__cause__, exception.__context__, *(exception.exceptions or ()))):
        _trim(other)


def _is_machinery(filename: str) -> bool:
    """Return whether a file is torch's or instep's: what user code calls, and is called by."""
    return f"{os.sep}torch{os.sep}" in filename or filename.startswith((PACKAGE, "<frozen"))


_HERE = os.path.dirname(os.path.abspath(__file__))


def _is_launchers(filename: str) -> bool:
    return filename.startswith(("<frozen runpy", _HERE + os.sep)) or filename.endswith("runpy.py")
