"""A rank in a worker of Ray: it runs the entry, and notes how that failed if it did.

[Note: Ranks under Ray]
Ray Train starts the workers, notices when one dies, and then starts all of them again. It does not know what an error
means, so the ranks judge it themselves. A rank that fails notes how in the scratch folder of the launch, which is in
the run directory. If another attempt could only fail the same way, it leaves the mark `given-up` and returns as if all
were well; the others, which notice that it is gone, do the same, and the launcher reads the notes. The process group is
ours: Ray's own would be a plain gloo, without shared memory, made before an error could be reported.

Ranks: all, in a thread of Ray's worker process: no signal reaches them, so a mark asks them to stop.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import get_device

from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import EXIT_USER, FailureRecord
from instep.core.stop import StopRequest
from instep.core.topology import Place
from instep.events.write import log_restart
from instep.launch.failures import failure_of_exception, order_failures
from instep.launch.logs import LogPlan, redirect_output
from instep.launch.restart import plan_restart
from instep.launch.scratch import Scratch
from instep.launch.worker import wait_for_cause

_POLL_S = 0.2
_STUCK_S = 5.0
"""How long a rank may run after another one has given up: it may wait for that one where no error can reach it."""


@dataclass(frozen=True)
class RayJob:
    """What a rank needs to know."""

    entry: Callable[..., Any]
    args: tuple[Any, ...]
    scratch: Scratch
    """That of the launch; a rank that sees its folder sees the run directory."""
    run_dir: Path
    logs: LogPlan
    working_dir: str
    max_restarts: int


@dataclass(frozen=True)
class Meeting:
    """What rank 0 decides for all ranks."""

    attempt: int
    world_size: int
    reached: int
    """The newest step that earlier attempts have saved."""
    address: str
    port: int
    given_up: bool


def work(config: dict[str, Any]) -> None:
    """Run one rank of one attempt; Ray Train calls this on each of its workers."""
    job: RayJob = config["job"]
    scratch, rank = job.scratch, ray.train.get_context().get_world_rank()
    meeting: Meeting = broadcast_from_rank_zero(_plan_meeting(job) if rank == 0 else None)
    if meeting.given_up:
        return
    sees_run = scratch.folder.is_dir()
    if sees_run:
        scratch.start_attempt(meeting.attempt)
        scratch.announce_logs(rank, redirect_output(job.logs, rank))
        if rank == 0 and meeting.attempt:
            log_restart(job.run_dir, f"restart {meeting.attempt} after {cause_of(scratch, meeting.attempt - 1)}")
    if Path(job.working_dir).is_dir():
        os.chdir(job.working_dir)
    stop = StopRequest()
    try:
        with polling(lambda done: _follow_marks(scratch, stop, done), "instep-marks"):
            result = job.entry(_place(meeting), meeting.attempt, stop, sees_run, *job.args)
            scratch.save_result(meeting.attempt, rank, result)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        record = failure_of_exception(error, rank, time.time_ns(), str(job.logs.error_file(rank)))
        # A rank that cannot see the folder cannot note anything; the others raise the same error, and can.
        if not (_is_given_up(job, meeting, record) if sees_run else record.final):
            raise


def cause_of(scratch: Scratch, attempt: int) -> str:
    """Return a line on what ended an attempt."""
    causes = order_failures(scratch.load_failures(attempt))
    return causes[0].line if causes else "a worker was lost without an error"


def _plan_meeting(job: RayJob) -> Meeting:
    """Return, on rank 0, which attempt this is and where the ranks meet."""
    context = ray.train.get_context()
    one_node = context.get_local_world_size() == context.get_world_size()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    return Meeting(
        attempt=job.scratch.last_attempt() + 1,
        world_size=context.get_world_size(),
        reached=RunDirectory(job.run_dir).progress(),
        address="127.0.0.1" if one_node else ray.util.get_node_ip_address(),
        port=port,
        given_up=job.scratch.is_marked("given-up"),
    )


def _place(meeting: Meeting) -> Place:
    context = ray.train.get_context()
    return Place(
        rank=context.get_world_rank(),
        local_rank=context.get_local_rank(),
        node_rank=context.get_node_rank(),
        world_size=meeting.world_size,
        local_world_size=context.get_local_world_size(),
        launcher="ray",
        master_addr=meeting.address,
        master_port=meeting.port,
        device=str(get_device()),
        attempt=meeting.attempt,
    )


def _is_given_up(job: RayJob, meeting: Meeting, record: FailureRecord) -> bool:
    """Note how this rank failed; return whether no other attempt follows. Issues no collectives."""
    scratch, attempt = job.scratch, meeting.attempt
    scratch.save_failure(attempt, record)
    if record.consequence:
        wait_for_cause(scratch, attempt, meeting.world_size)
    failures = order_failures(scratch.load_failures(attempt))
    progress = RunDirectory(job.run_dir).progress()
    further = progress > meeting.reached
    previous = [] if further or not attempt else order_failures(scratch.load_failures(attempt - 1))
    # Ray counts the restarts, but cannot know whether one is of any use.
    plan = plan_restart(failures, previous, in_vain=0, max_restarts=1, has_begun=progress >= 0)
    if plan.restart or not job.max_restarts:
        return scratch.is_marked("given-up")
    scratch.mark("given-up")
    if not failures[0].final and failures[0].exit_code == EXIT_USER:
        scratch.save_failure(attempt, plan.failures[0])
    return True


def _follow_marks(scratch: Scratch, stop: StopRequest, done: threading.Event) -> None:
    """Look for the marks that ask this rank to stop or say that another one has given up."""
    if scratch.is_marked("asked"):
        stop.asked = True
    if scratch.is_marked("given-up") and not done.wait(_STUCK_S):
        os._exit(EXIT_USER)


@contextlib.contextmanager
def polling(look: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Call `look` again and again, in a thread, until the block is left; it gets an event that is set then."""
    done = threading.Event()

    def poll() -> None:
        while not done.wait(_POLL_S):
            look(done)

    thread = threading.Thread(target=poll, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
