"""Run the trials of a search: start them, follow their evaluations, prune, record how they end.

Ranks: none; this is the process that launches the trials. All decisions are made in its main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from instep.core.errors import CheckpointError, FailureRecord, InstepError, Interrupted, RanksFailed, SpecError
from instep.core.stop import StopRequest
from instep.launch.signals import handle_stops, signals_restored
from instep.tune.folder import SearchFolder
from instep.tune.ledger import Ledger, storage_url
from instep.tune.objective import check_names
from instep.tune.place import TrialPlace
from instep.tune.plan import SearchPlan
from instep.tune.recorder import Facts, TrialRecorder, sentence_of
from instep.tune.report import write_report
from instep.tune.result import Status, TrialRecord, TuneResult, train_command
from instep.tune.scheduler import Verdict
from instep.tune.study import SearchStudy
from instep.tune.trial_run import Evaluation, RunningTrial

_POLL_S = 0.1
_CLAIM_EVERY_S = 1.0
"""How often to look for a trial while there is none to start; others may leave one."""
Show = Callable[[TuneResult], object]
"""Shows how far a search is; called after each change."""


@dataclass
class _Slot:
    """A trial that is running, and what is known of its end before it comes."""

    trial: RunningTrial
    begun: float
    pruned_at: Evaluation | None = None


class Search:
    """A search in its folder."""

    def __init__(self, plan: SearchPlan, folder: SearchFolder, show: Show, place: TrialPlace) -> None:
        self._plan, self._folder, self._show, self._place = plan, folder, show, place
        self._packing = place.packing()
        self._paused: set[int] = set()
        """Trials that wait to be continued, as known when this process last looked for a trial."""
        self._slots: dict[int, _Slot] = {}
        self._waiting: list[FrozenTrial] = []
        self._woken = threading.Event()
        self._stop = StopRequest()
        self._claim_at = 0.0
        self._waits = False
        """Whether there is nothing to do until other processes have trained theirs."""
        self._status: Status = "complete"
        self._claims = folder.claims()
        with self._claims.deciding():
            self._open()

    def _open(self) -> None:
        """Open the study, or make it."""
        plan, folder = self._plan, self._folder
        search_id = folder.describe(plan.describe())
        maximized = [StudyDirection.MINIMIZE if g.is_lowest_best else StudyDirection.MAXIMIZE for g in plan.tune.goals]
        url = storage_url(folder.path, plan.tune.storage)
        self._ledger = Ledger.open(url, plan.study_name, maximized, search_id)
        self._study = SearchStudy(
            *(plan.study_name, maximized, self._ledger, plan.make_sampler, plan.make_pruner),
            judges_again=plan.tune.scheduler.judges_again,
        )
        self._scheduler = plan.tune.scheduler(plan, self._study, folder)
        self._recorder = TrialRecorder(plan, self._study)

    def run(self) -> TuneResult:
        """Run all trials that are left, and return the outcome."""
        begun = time.monotonic()
        with self._signals_handled(), self._left_in_order():
            if not self._claims.is_shared:
                self._restore()
            while True:
                self._end_in_time(begun)
                while len(self._slots) < self._packing.limit and (trial := self._claim()) is not None:
                    self._begin(trial)
                if not self._slots and not (self._waits and self._status == "complete"):
                    break
                self._woken.wait(_POLL_S)
                self._woken.clear()
                for slot in list(self._slots.values()):
                    self._follow(slot)
                self._packing.measure([slot.trial.evaluations.load for slot in self._slots.values()])
        return self.result()

    def _claim(self) -> FrozenTrial | None:
        """Return the next trial, claimed for this process; None: there is none to start."""
        if self._status != "complete" or time.monotonic() < self._claim_at:
            return None
        with self._claims.deciding():
            self._waits = False
            if self._claims.is_shared and not self._waiting:
                self._study.sync()
                self._restore()
            trial = self._next()
            if trial is not None:
                self._claims.take(trial.number)
            elif not self._slots:  # under the same lock: nobody can change what there is to do
                self._leave()
        self._claim_at = 0.0 if trial is not None else time.monotonic() + _CLAIM_EVERY_S
        return trial

    def _restore(self) -> None:
        """Take in trials that nobody runs: the first one to continue (alone: all), and those that are paused."""
        self._paused.clear()
        others = [trial.number for trial in self._study.unfinished() if trial.number not in self._slots]
        free = {number for number in others if self._claims.take(number)}
        if self._claims.is_shared:
            self._study.sync()  # after the claims: whoever had one before has recorded all that it ever will
        for trial in self._study.trials:
            if (number := trial.number) in self._slots:
                continue
            is_paused = self._scheduler.begin(trial)
            if number in free and not trial.state.is_finished():
                if is_paused:
                    self._paused.add(number)
                elif not (self._claims.is_shared and self._waiting):
                    self._waiting.append(trial)
                    continue
            self._claims.release(number)

    def _leave(self) -> None:
        """Decide how a search ends for which this process finds nothing to do, and that others may still work on."""
        if len(self._study.unfinished()) > len(self._paused):
            self._waits = self._scheduler.waits_for_all
            if not self._waits:
                self._status = "running"
        else:
            for number in sorted(self._paused):
                self._recorder.leave(number, self._scheduler.sentence(number))
            self._paused.clear()

    def result(self) -> TuneResult:
        """Return what is known now."""
        records = (TrialRecord.of(trial, self._folder.trial(trial.number)) for trial in self._study.trials)
        trials = [r if r.number not in self._paused else dataclasses.replace(r, state="paused") for r in records]
        packing, path = self._packing, str(self._folder.path)
        return TuneResult(
            self._plan.tune.goals, tuple(trials), self._status, path, at_once=packing.limit, speedup=packing.speedup
        )

    def conclude(self, result: TuneResult) -> TuneResult:
        """Return the outcome with the command that trains the best trial again, and write the page of the search."""
        if (best := result.best) is not None and self._plan.file is not None and best.copied_from is None:
            plan = self._plan.trial(best.number, best.params, Path(best.run_dir)).as_begun(Path(best.run_dir))
            result = dataclasses.replace(result, command=train_command(self._plan.file, plan.task, plan.spec))
        if result.status in ("complete", "out-of-time"):
            write_report(self._folder.report, result, self._study.study)
        return result

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C has ended it."""
        return self._stop.interrupted

    def _next(self) -> FrozenTrial | None:
        """Return the next trial: one that an earlier process left, or a new one; None: there is none to start."""
        if self._status != "complete":
            return None
        if self._waiting:
            return self._waiting.pop(0)
        if (resumed := self._scheduler.resume(self._paused)) is not None:
            return self._resume(resumed)
        number, points = len(self._study.trials), self._plan.tune.points
        if number >= self._plan.num_trials or self._study.is_exhausted:
            return self._last()
        point = points[number] if number < len(points) else None
        known = self._paused if self._scheduler.paused_are_known else ()
        trial = self._study.next(self._plan.suggest, point, known)
        self._scheduler.begin(trial)
        return trial

    def _resume(self, number: int) -> FrozenTrial:
        """Return a trial that was paused, to be continued."""
        self._paused.discard(number)
        return self._study.trials[number]

    def _last(self) -> FrozenTrial | None:
        """Return the trial that has to be trained to its end, if none is complete when all others are done."""
        is_won = any(trial.state == TrialState.COMPLETE for trial in self._study.trials)
        if is_won or len(self._study.unfinished()) > len(self._paused):
            return None
        best = self._scheduler.resume_last(self._paused)
        return None if best is None else self._resume(best)

    def _begin(self, trial: FrozenTrial) -> None:
        """Start a trial's training; parameters that cannot be trained are a failed trial."""
        number = trial.number
        try:
            plan = self._plan.trial(number, trial.params, self._folder.trial(number))
            plan = self._scheduler.adapt(plan.as_begun(plan.run_dir))
            if isinstance(plan.spec.processes, int):
                plan.spec.check_world(plan.spec.processes)
        except Exception as error:  # noqa: BLE001 - the Task's own checks may raise anything
            self._fail(number, str(error) if isinstance(error, InstepError) else f"{type(error).__name__}: {error}")
            self._claims.release(number)
            return
        self._slots[number] = slot = _Slot(self._place.start(plan, self._woken.set), time.monotonic())
        self._read(slot)
        self._show(self.result())

    def _follow(self, slot: _Slot) -> None:
        """Take in what a trial has evaluated, and its end."""
        is_done = slot.trial.is_done()  # before its events are read: then none is missed
        changed = self._read(slot)
        if is_done:
            self._end(slot)
            if all(trial.number != slot.trial.plan.number for trial in self._waiting):
                self._claims.release(slot.trial.plan.number)
            self._claim_at = 0.0
        if changed or is_done:
            self._show(self.result())

    def _read(self, slot: _Slot) -> bool:
        """Report the new evaluations of a trial, and ask it to stop at the first one that prunes it."""
        changed = False
        goals, number = self._plan.tune.goals, slot.trial.plan.number
        for evaluation in slot.trial.evaluations.poll():
            check_names(goals, self._plan.tune.limits, evaluation.metrics)
            if slot.pruned_at is not None or len(goals) > 1 or goals[0].name not in evaluation.metrics:
                continue
            verdict = self._scheduler.take(number, evaluation.number, evaluation.metrics[goals[0].name])
            changed |= verdict is not Verdict.IGNORED
            if verdict is Verdict.PRUNED:
                slot.pruned_at = evaluation
            if verdict in (Verdict.PRUNED, Verdict.PAUSED):
                slot.trial.stop()
        return changed

    def _end(self, slot: _Slot) -> None:
        """Record how a trial ended; one that only was asked to stop stays as it is, to be continued."""
        number = slot.trial.plan.number
        del self._slots[number]
        facts: Facts = {"wall_s": round(time.monotonic() - slot.begun, 3)}
        try:
            result = slot.trial.result()
        except RanksFailed as failed:
            self._end_failed(slot, failed.first, facts)
            return
        except (CheckpointError, SpecError) as error:
            self._scheduler.end(number, "failed")
            self._fail(number, str(error), facts)
            return
        if self._scheduler.end(number, result["status"]):
            self._paused.add(number)
        elif slot.pruned_at is not None:
            self._recorder.prune(number, slot.pruned_at, facts)
        elif result["status"] == "complete":
            self._recorder.complete(slot.trial.plan, result, facts)
        elif self._status == "complete":  # somebody else asked its ranks to leave: it continues
            self._waiting.append(self._study.trials[number])

    def _end_failed(self, slot: _Slot, failure: FailureRecord, facts: Facts) -> None:
        """Record a trial whose ranks failed."""
        number = slot.trial.plan.number
        is_paused = self._scheduler.end(number, "failed")
        if self._status != "complete" and slot.pruned_at is None:
            return  # killed together with the search
        if failure.out_of_memory:
            self._recorder.out_of_memory(number, failure, facts)
        elif is_paused:
            self._paused.add(number)
        elif slot.pruned_at is None:
            self._fail(number, sentence_of(failure), facts)
        else:
            self._recorder.prune(number, slot.pruned_at, facts)

    def _fail(self, number: int, sentence: str, facts: Facts | None = None) -> None:
        self._recorder.fail(number, sentence, facts)
        self._show(self.result())

    def _end_in_time(self, begun: float) -> None:
        """Ask all trials to save and leave when the search was asked to, or its time is over."""
        if self._status != "complete":
            return
        limit = self._plan.tune.time_s
        if self._stop.asked:
            self._status = "preempted"
        elif limit is not None and time.monotonic() - begun >= limit:
            self._status = "out-of-time"
        else:
            return
        for slot in self._slots.values():
            slot.trial.stop()

    @contextlib.contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """Make the first signal end the search in order, and the second at once."""

        def end(_number: Any) -> None:
            raise Interrupted("interrupted")

        with signals_restored():
            handle_stops(self._stop, lambda: True, lambda _: self._woken.set(), end)
            yield

    @contextlib.contextmanager
    def _left_in_order(self) -> Iterator[None]:
        """Leave no rank running, and the storage closed, however the search ends."""
        try:
            yield
        finally:
            for slot in self._slots.values():
                slot.trial.kill()
            self._ledger.close()


def search(plan: SearchPlan, path: Path | None, fresh: bool, show: Show) -> tuple[TuneResult, bool]:
    """Search, or continue a search, in a folder; return the outcome, and whether Ctrl-C has ended it."""
    plan.check()
    place = plan.place()
    name = type(plan.task).__name__.lower()
    with SearchFolder.opened(path, name, fresh, plan.tune.is_shared) as folder, place.opened(folder):
        running = Search(plan, folder, show, place)
        return running.conclude(running.run()), running.interrupted
