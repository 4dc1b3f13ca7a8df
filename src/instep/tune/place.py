"""The seam for where trials run: one small class, one registry line for each.

To run trials somewhere else, write a module with a subclass of `TrialPlace`, and one of `RunningTrial`, and add its
line to `_PLACES`; `--on NAME` then selects it. The search knows no more of a place than this.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable

from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.tune.folder import SearchFolder
from instep.tune.packing import Packing
from instep.tune.trial_run import RunningTrial, TrialPlan

_PLACES = {
    "here": "instep.tune.local_place:LocalPlace",
    "ray": "instep.tune.ray_place:RayPlace",
}
"""By name, as `module:class`: a place's packages are imported only when it is used."""


class TrialPlace(ABC):
    """Starts trials."""

    def __init__(self, spec: TrainSpec, parallel: int | None, gpus_per_trial: float | None = None) -> None:
        """`spec` is that of all trials; `parallel`: how many run at once, None: as many as there is room for."""
        self.spec, self.parallel, self.gpus_per_trial = spec, parallel, gpus_per_trial

    @abstractmethod
    def share(self) -> tuple[TrainSpec, str]:
        """Return the spec of one trial, with its share of the threads, and a sentence about it, or nothing."""

    @abstractmethod
    def packing(self) -> Packing:
        """Return what decides how many trials run at once; called when the place is open."""

    def opened(self, folder: SearchFolder) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 - for subclasses
        """Return a block within which trials can be started; at its end none is left running."""
        return contextlib.nullcontext()

    @abstractmethod
    def start(self, plan: TrialPlan, wake: Callable[[], object]) -> RunningTrial:
        """Start a trial's training; `wake` may be called when it has ended."""


def find_place(spec: TrainSpec, parallel: int | None, gpus_per_trial: float | None = None) -> TrialPlace:
    """Return the place that a spec asks for."""
    if spec.on not in _PLACES:
        raise SpecError(f"on={spec.on!r} is unknown. Choose one of {', '.join(_PLACES)}.")
    module, _, kind = _PLACES[spec.on].partition(":")
    try:
        place = getattr(importlib.import_module(module), kind)
    except ImportError as error:
        raise SpecError(
            f"on={spec.on} needs a package that is not installed ({error}): pip install 'instep[{spec.on}]'"
        ) from error
    made = place(spec, parallel, gpus_per_trial)
    assert isinstance(made, TrialPlace)
    return made
