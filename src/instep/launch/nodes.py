"""The launcher for several nodes: it runs on each of them, and they meet in the control store.

Ranks: none; this is the process that launches them.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from instep.core.errors import EnvironmentFailed, RanksFailed, SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.topology import Place
from instep.launch.elastic import ElasticRanks, Rendezvous, elastic_ranks, signal_behind
from instep.launch.failures import environment_failure
from instep.launch.keeper import Job
from instep.launch.launcher import Launcher, LaunchJob, S
from instep.launch.logs import LogPlan
from instep.launch.membership.agent import Generation, NodeAgent
from instep.launch.membership.control_store import ControlStore
from instep.launch.membership.registration import registered
from instep.launch.membership.rendezvous import plan_rules, plan_store, split_endpoint
from instep.launch.scratch import Scratch
from instep.world.interfaces import interface_of, interfaces, is_loopback, socket_variables

_START_S = 60.0
"""How long the nodes of a generation may take to start their ranks."""


class NodesLauncher(Launcher):
    """Starts ranks on this node, in generations with the other nodes; see [Note: Losing nodes]."""

    def prepare(self, spec: S, place: Place) -> S:
        """Return the spec with the host of the control store, where SLURM says which node that is.

        Only the launcher on SLURM's first node may host it; otherwise any launcher that finds the address on its own
        machine tries to.
        """
        if getattr(spec, "run_dir", "") is None:
            raise SpecError(
                f"nnodes={spec.nnodes}: each node would make a run directory of its own. Give all of them the same "
                "--run-dir, on a disk that they share."
            )
        host, _ = split_endpoint(spec.rdzv_endpoint)
        if place.launcher != "slurm" or host != place.master_addr or "is_host" in spec.rdzv_conf:
            return spec
        return dataclasses.replace(spec, rdzv_conf=f"{spec.rdzv_conf},is_host={int(place.is_main)}".lstrip(","))

    def run(self, job: LaunchJob) -> dict[int, Any]:
        """Run the job in generations; return the results of this node, none if the others have done everything."""
        plan = plan_store(job.spec)
        assert plan is not None
        with elastic_ranks(job) as ranks:
            scratch = ranks.job.scratch
            store = ControlStore.open(plan, job.say, lambda: scratch.is_marked("asked"))
            job.meet(store.identity)
            with join_job(store, job, scratch, ranks.job.logs) as agent:
                return _run_generations(agent, store, ranks)


@contextlib.contextmanager
def join_job(
    store: ControlStore, job: LaunchJob, scratch: Scratch, logs: LogPlan, clock: Callable[[], int] = time.time_ns
) -> Iterator[NodeAgent]:
    """Register this node, and send heartbeats for as long as the block lasts."""
    spec = job.spec
    if spec.node_rank is not None and spec.rdzv_backend != "static":
        job.say(
            f"--node-rank {spec.node_rank} is ignored: with --rdzv-backend {spec.rdzv_backend} the nodes are numbered "
            "as they join. --rdzv-backend static keeps the numbers."
        )
    with (
        registered(store, spec, job.request, clock) as node,
        NodeAgent(store, node, plan_rules(spec), scratch, logs, job.progress, job.say, clock) as agent,
    ):
        yield agent


def _run_generations(agent: NodeAgent, store: ControlStore, ranks: ElasticRanks) -> dict[int, Any]:
    number, interface_said = -1, False
    while (generation := agent.next_generation(number)) is not None:
        number = generation.number
        try:
            with agent.working(number):
                agent.check_reach(generation)
                rendezvous = _rendezvous_of(generation, agent.key, store, ranks.launch.spec)
                if generation.why and rendezvous.node_rank == 0:
                    ranks.launch.on_restart(generation.why)
                if not interface_said and generation.others:
                    interface_said = True
                    _say_interface(generation.own.host, ranks.launch.say)
                results = ranks.run(_job_of(generation, ranks), rendezvous)
        except RanksFailed as failed:
            agent.report_failures(failed.failures, number)
        except EnvironmentFailed as error:
            if signal_behind(error) is not None:
                raise
            agent.report_failures([environment_failure(str(error), time.time_ns())], number)
        else:
            agent.report_done()
            return results
    return {}


def _rendezvous_of(generation: Generation, key: int, store: ControlStore, spec: LaunchSpec) -> Rendezvous:
    """Number the nodes of a generation: by the given node ranks, or in the order in which they joined."""
    keys = sorted((key, *generation.others))
    node_rank = spec.node_rank or 0 if spec.rdzv_backend == "static" else keys.index(key)
    elastic_store = store.elastic_store(generation.number, _START_S)
    return Rendezvous(elastic_store, node_rank, len(keys), generation.own.host)


def _job_of(generation: Generation, ranks: ElasticRanks) -> Job:
    """Make the ranks of a generation use the network interface that the other nodes reach."""
    environ = {**ranks.job.environ, **socket_variables(interface_of(generation.own.host), ranks.job.environ)}
    return dataclasses.replace(ranks.job, attempt=generation.number, environ=environ)


def _say_interface(host: str, say: Callable[[str], None]) -> None:
    """Name the network interface that was chosen where there is a choice."""
    interface = interface_of(host)
    others = [name for name in interfaces() if name not in ("lo", interface)]
    if others and not is_loopback(host):
        say(f"the nodes communicate over {interface} ({host}), not over {', '.join(others)}")
