"""`--find workers`, `threads` and `processes`: the fastest number of them on this machine, by measurement."""

from __future__ import annotations

import dataclasses
import os
from abc import abstractmethod
from typing import Any

from instep.core.errors import SpecError
from instep.core.plural import plural
from instep.core.spec import TrainSpec
from instep.launch.processes import check_process_count
from instep.tune.finders.candidates import doublings, read_list
from instep.tune.finders.choice import Choice, fastest_of, speeds
from instep.tune.finders.finder import Finder, Finding, FindRequest, Plot
from instep.tune.finders.scratch import scratch_folder
from instep.tune.finders.tables import speed_columns, speed_json, speed_series
from instep.tune.finders.throughput import measure_in_turns
from instep.world.device import device_count

_MOST_CANDIDATES = 6


class SettingFinder(Finder):
    """Finds how many of something make a training fastest."""

    name: str
    """As in `--find`."""
    option: str
    """The field of the spec."""
    nouns: tuple[str, str]
    """What is counted, one and several."""
    least = 1

    @property
    def what(self) -> str:
        """What is counted, in words."""
        return self.nouns[1]

    @abstractmethod
    def most(self, request: FindRequest) -> int:
        """Return the largest number that is tried unless others are asked for."""

    def candidates(self, request: FindRequest) -> tuple[int, ...]:
        """Return the numbers to compare."""
        if request.over:
            return read_list(request.over, self.least, self.what)
        numbers = doublings(self.least, self.most(request))[:_MOST_CANDIDATES]
        return tuple(number for number in numbers if self._is_possible(request, number))

    def specs(self, request: FindRequest) -> dict[int, TrainSpec]:
        """Return the spec of each candidate."""
        return {number: self._spec(request, number) for number in self.candidates(request)}

    def check(self, request: FindRequest) -> None:
        """Raise SpecError for candidates that cannot run, or if there is only one."""
        if request.num_rounds < 1:
            raise SpecError(f"rounds={request.num_rounds} would measure nothing. Use at least 1; 2 or more compare.")
        specs = self.specs(request)
        if len(specs) < 2:
            raise SpecError(
                f"this machine leaves only {list(specs)} for the number of {self.what}, so there is nothing to "
                "compare. Give numbers with --over, for instance --over 1,2."
            )
        for spec in specs.values():
            check_process_count(spec.processes, len(os.sched_getaffinity(0)), device_count())
            spec.check_world(int(spec.processes))

    def find(self, request: FindRequest) -> Finding:
        """Time the candidates in turns, and choose the fastest that can be told from smaller ones."""
        self.check(request)
        with scratch_folder() as folder:
            rates = measure_in_turns(request, self.specs(request), folder)
        choice, by_choice = fastest_of(rates), speeds(rates)
        series = speed_series(by_choice)
        return Finding(
            self.name,
            choice.chosen,
            (self._sentence(choice, len(rates[choice.fastest])),),
            changes={self.option: choice.chosen},
            measured={"candidates": speed_json(rates), "fastest": choice.fastest, "is_clear": choice.is_clear},
            head=(self.what, "samples/s", "95 % interval"),
            rows=tuple((str(number), *columns) for number, columns in speed_columns(by_choice).items()),
            plots=(Plot(f"samples/s by {self.what}", self.what, [series]),) if min(by_choice) > 0 else (),
        )

    def _sentence(self, choice: Choice, num_rounds: int) -> str:
        use = f"Use {plural(choice.chosen, *self.nouns)}"
        if choice.is_clear:
            return f"{use}: clearly the fastest in {num_rounds} rounds."
        if choice.chosen == choice.fastest:
            return f"{use}: the fastest in {num_rounds} rounds, though others may be as fast."
        return (
            f"{use}: {choice.fastest} had the highest mean in {num_rounds} rounds, but "
            f"cannot be told from {choice.chosen}, which takes less of the machine."
        )

    def _spec(self, request: FindRequest, number: int) -> TrainSpec:
        changes: dict[str, Any] = {self.option: number}
        return dataclasses.replace(request.spec, **changes)

    def _is_possible(self, request: FindRequest, number: int) -> bool:
        spec = self._spec(request, number)
        try:
            spec.check_world(int(spec.processes))
        except SpecError:
            return False
        return True


class WorkersFinder(SettingFinder):
    """Finds the number of data workers of each rank."""

    name, option, nouns, least = "workers", "data_workers", ("data worker", "data workers"), 0

    def most(self, request: FindRequest) -> int:
        """Return as many as there are cores for each rank, and one more than none."""
        return max(2, 2 * len(os.sched_getaffinity(0)) // request.processes)


class ThreadsFinder(SettingFinder):
    """Finds the number of threads of each rank."""

    name, option, nouns = "threads", "threads", ("thread", "threads")

    def most(self, request: FindRequest) -> int:
        """Return the cores of each rank."""
        return max(1, len(os.sched_getaffinity(0)) // request.processes)


class ProcessesFinder(SettingFinder):
    """Finds the number of processes on this node."""

    name, option, nouns = "processes", "processes", ("process", "processes")

    def most(self, request: FindRequest) -> int:
        """Return one for each accelerator, or for each core."""
        del request
        return device_count() or len(os.sched_getaffinity(0))
