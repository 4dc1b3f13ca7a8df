"""The launcher for one node: its ranks, and their restarts.

Ranks: none; this is the process that launches them.
"""

import dataclasses
from typing import Any

from instep.core.errors import FailureRecord, RanksFailed
from instep.launch.elastic import Rendezvous, elastic_ranks
from instep.launch.launcher import Launcher, LaunchJob
from instep.launch.membership.rendezvous import plan_store
from instep.launch.restart import plan_restart


class LocalLauncher(Launcher):
    """Starts all ranks on this node."""

    def run(self, job: LaunchJob) -> dict[int, Any]:
        """Run the job, with restarts, until it is done or another restart is of no use."""
        plan_store(job.spec)  # checks the options of a rendezvous, which are ignored here
        max_restarts = job.spec.max_restarts
        attempt, in_vain, reached = 0, 0, job.progress()
        previous: tuple[FailureRecord, ...] = ()
        with elastic_ranks(job) as ranks:
            while True:
                try:
                    return ranks.run(dataclasses.replace(ranks.job, attempt=attempt), Rendezvous())
                except RanksFailed as failed:
                    if job.progress() > reached:
                        in_vain, reached, previous = 0, job.progress(), ()
                    plan = plan_restart(failed.failures, previous, in_vain, max_restarts, has_begun=reached >= 0)
                    if not plan.restart or job.stop.ended:
                        raise RanksFailed(plan.failures) from None
                    attempt, in_vain, previous = attempt + 1, in_vain + 1, failed.failures
                    reason = f"restart {in_vain} of {max_restarts} after {failed}"
                    job.say(reason)
                    job.on_restart(reason)
