"""Trials on this machine: how they share its cores and memory ([Note: Trials in threads], [Note: Packing])."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from instep.core.errors import SpecError
from instep.core.plural import plural
from instep.core.spec import TrainSpec
from instep.launch.processes import check_process_count
from instep.launch.resources import available_memory_bytes
from instep.tune.packing import Packing, Room
from instep.tune.place import TrialPlace
from instep.tune.trial_run import LocalTrial, RunningTrial, TrialPlan
from instep.world.device import current_accelerator, device_count


class LocalPlace(TrialPlace):
    """This machine."""

    def __init__(self, spec: TrainSpec, parallel: int | None, gpus_per_trial: float | None = None) -> None:
        super().__init__(spec, parallel, gpus_per_trial)
        if gpus_per_trial is not None:
            raise SpecError(
                f"gpus_per_trial={gpus_per_trial} is for trials that Ray places. Add --on ray; here all trials share "
                "the GPUs of this machine."
            )

    def share(self) -> tuple[TrainSpec, str]:
        """Divide this machine's cores between trials that run at once."""
        return divide_cores(self.spec, self.parallel)

    def packing(self) -> Packing:
        """Return what decides how many run at once, by cores and memory."""
        accelerator = current_accelerator()
        free = available_memory_bytes() if accelerator is None else min(size for _, size in accelerator.devices())
        return Packing(self.parallel, Room(most_at_once(self.spec), free))

    def start(self, plan: TrialPlan, wake: Callable[[], object]) -> RunningTrial:
        """Start a trial from a thread."""
        return LocalTrial(plan, wake)


def most_at_once(spec: TrainSpec) -> int:
    """Return how many trials at once this machine has cores for."""
    cores = len(os.sched_getaffinity(0))
    processes = check_process_count(spec.processes, cores, device_count())
    return max(1, cores // (processes * (1 if device_count() else spec.num_threads or 1)))


def divide_cores(spec: TrainSpec, parallel: int | None) -> tuple[TrainSpec, str]:
    """Return the spec of one of several trials at once, with its share of the threads, and a sentence about it."""
    cores = len(os.sched_getaffinity(0))
    num_gpus = device_count()
    processes = check_process_count(spec.processes, cores, num_gpus)
    if parallel == 1:
        return spec, ""
    threads = spec.num_threads or (1 if parallel is None else max(1, cores // (parallel * processes)))
    spec = dataclasses.replace(spec, threads=threads)
    each = f"each with {plural(processes, 'process', 'processes')} of {plural(threads, 'thread')}"
    if parallel is None:
        most = most_at_once(spec)
        text = f"at most {plural(most, 'trial')} at once, {each}; the first runs alone until its memory is known."
        return spec, text
    busy = parallel * processes * threads
    each = f"{plural(parallel, 'trial')} at once, {each}"
    if num_gpus:
        text = f"{each}. They share {plural(num_gpus, 'GPU')}: its memory has to suffice for all of them."
    elif busy > cores:
        text = f"{each}: {busy} threads share {plural(cores, 'core')}, so that each takes longer. Use less --parallel."
    else:
        text = f"{each}, on {plural(cores, 'core')}."
    return spec, text
