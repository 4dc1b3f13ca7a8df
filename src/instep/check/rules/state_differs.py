"""state-differs: what belongs to the model, the loss or the data is another value on each rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.evaluated_metrics import is_of_evaluation
from instep.check.finding import Finding, Severity
from instep.check.live_paths import LivePath, live_paths
from instep.check.observations import Observed
from instep.check.passes import is_data_parallel
from instep.check.records.collectives import ModelSplit
from instep.check.records.gradients import ModelWrapped
from instep.check.records.live_state import LiveState
from instep.check.records.model_state import FirstUpdate
from instep.check.records.timeline import steps_together, wrappers_of
from instep.check.replication import are_connected, are_replicas
from instep.check.rule import Rule
from instep.check.source.collective_calls import is_distributed
from instep.check.source.guarded_loads import loads_by_one_rank
from instep.check.source.loops import function_around, module_of, statement_at
from instep.check.source.loss_inputs import begins_anew, loss_inputs, outlives_batches
from instep.check.source.module import SourceModule
from instep.check.source.own_sums import is_own_sum
from instep.check.source.part_statistics import statistics_of_parts
from instep.check.source.set_orders import hashed_names, numbered_sets, parts_of_sets
from instep.check.source.setting_places import layer_place, setting_place
from instep.check.source.state_places import (
    acts_at,
    changes_by_one_rank,
    guarded_use,
    is_carried,
    is_computed_with,
    is_drawn,
    place_of,
    updates_of,
    updating_call,
)

_STATISTIC = re.compile(
    r"(^|_)(mean|means|m2|std|stds|var|mu|sigma|minimum|maximum|weights?|freqs?|frequenc(y|ies)|priors?|idf"
    r"|class_weights?|pos_weight|centroids?|cent(er|re)s?|codebook|prototypes?|thresholds?|temperature|norm_stats|stats|statistics"
    r"|scaler?|offset|loc|shift|median|quantiles?|balance|ratio)(_|$|\d)",
    re.IGNORECASE,
)
_SETTINGS = ("args", "config", "cfg", "opts")
_ADAPTED = re.compile(
    r"(^|_)(baseline|ema|running|moving|level|difficulty|stage|temperature|scale|threshold|margin|curriculum|beta"
    r"|lambda|lam|epsilon|prob|ratio|kl_coef|alpha)(_|$|\d)",
    re.IGNORECASE,
)
"""Numbers that a training adapts to what it sees, and computes with."""
_TUNED = re.compile(r"(^|_)(thresholds?|thresh|cutoffs?|temperatures?|calibrat(ion|or)|platt)(_|$|\d)", re.IGNORECASE)
"""What is fitted to scores after training."""
_OF_A_BATCH = re.compile(r"loss|grad|batch|logit|pred|output|target|acc|time|score|metric|best", re.IGNORECASE)
_VOCABULARY = re.compile(
    r"class|label|vocab|token|categor|tag|2id|to_id|2idx|to_idx|stoi|species|intent", re.IGNORECASE
)
_AVERAGED = re.compile(r"ema|shadow|averag|teacher|target|momentum|swa|moving|running", re.IGNORECASE)
_OWN_DATA = re.compile(
    r"local|rank|seed|noise|mems|carry|cell|past|buffer|replay|rollout|memory|obs|reward|advantage|action|done|hidden|state|cache|batch|input"
    r"|target|label|index|indices|idx|iter|cursor|offset|position|time|step|seen|count|num_|^n$|history|best",
    re.IGNORECASE,
)
"""What a rank may rightly hold of its own part of the data, or of its own time."""
_SETTINGS_OF_A_STEP = ("lr", "weight_decay", "momentum", "eps", "max_norm")
_AFTER_STEPS = ("step", "evaluated")
"""Looks after which the training went on."""
_MIN_IDS = 2
_OF_ONE_RANK = "The state of the optimizer or its schedule is loaded on one rank only: the others begin anew."
_LOAD_EVERYWHERE = "Load the checkpoint on all ranks: DDP sends rank 0's parameters and buffers to the others, no more."


class StateDiffers(Rule):
    """Compares the ranks' variables: label ids, buffers, copies of the model, statistics, weights after a step."""

    id = "state-differs"
    severity = Severity.WARNING
    effect = "Each rank trains or evaluates with its own value; what rank 0 saves is that of its part of the data."
    watches: ClassVar = {LiveState: "variables after an optimizer step"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield what differs between ranks that train one model together."""
        if observed.world_size < 2 or observed.has(ModelSplit) or not are_connected(observed):
            return
        yield from self._changed_weights(observed, modules)
        if not (are_replicas(observed) or is_data_parallel(observed)):
            return
        for module in modules:
            if not is_distributed(module):  # the rest is read, too
                yield from self._read_sets(module)
        yield from self._ids(observed, modules)
        yield from self._buffers(observed, modules)
        yield from self._copies(observed, modules)
        yield from self._settings(observed, modules)
        yield from self._layers(observed, modules)
        found = list(self._statistics(observed, modules))
        yield from found
        yield from self._learned(observed, modules, {finding.place for finding in found})
        yield from self._tuned(observed, modules)

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield numbers that follow the order of a set, and states of the training that one rank loads."""
        if is_distributed(module):
            yield from self._read_sets(module)
            for call, part in statistics_of_parts(module):
                yield self.finding(
                    module.place(call.node),
                    "Each rank normalises its part of the data by the statistics of that part.",
                    f"`{module.line(call.node.lineno)}`; line {part.lineno}: `{module.line(part.lineno)}`",
                    "Compute them of the whole data, before each rank takes its part, or sum their parts with "
                    "all_reduce.",
                )
            for load in loads_by_one_rank(module):
                evidence = f"`{module.line(load.node.lineno)}` is reached by the first rank only"
                yield self.finding(module.place(load.node), _OF_ONE_RANK, evidence, _LOAD_EVERYWHERE)

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse runs on one rank."""
        return observed.world_size < 2

    def _read_sets(self, module: SourceModule) -> Iterable[Finding]:
        for node in numbered_sets(module):
            yield self.finding(
                module.place(node),
                "Names get their numbers in the order of a set, which is another one in each process.",
                f"`{module.line(node.lineno)}`: strings are hashed with another seed in each process",
                "- enumerate(set(names))\n+ enumerate(sorted(set(names)))",
            )
        for node in parts_of_sets(module):
            yield self.finding(
                module.place(node),
                "A part is taken of a set in its own order, which is another one in each process.",
                f"`{module.line(node.lineno)}`: strings are hashed with another seed in each process",
                "- list(set(names))[:n]\n+ sorted(set(names))[:n]",
            )
        for node in hashed_names(module):
            yield self.finding(
                module.place(node),
                "`hash` of a string is another number in each process.",
                f"`{module.line(node.lineno)}`: strings are hashed with another seed in each process",
                "- hash(name)\n+ zlib.crc32(name.encode())",
            )

    def _settings(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield numbers of an optimizer that the script sets to another value on each rank."""
        done: set[str] = set()
        for path in live_paths(observed, "settings", _AFTER_STEPS):
            key = path.names[-1]
            if key not in _SETTINGS_OF_A_STEP or key in done or not path.differs_at_the_end:
                continue
            place = setting_place(modules, key)
            if place is not None:
                done.add(key)
                yield self.finding(
                    place,
                    f"The optimizer's `{key}` is another one on each rank.",
                    f"after a step it was {path.shown}",
                    "Decide on all ranks alike: reduce what it is computed from, or broadcast rank 0's value.",
                    Severity.ERROR,
                )

    def _layers(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield layers of the trained model that are in another mode, or have another number, on each rank."""
        done: set[tuple[str, int]] = set()
        for path in live_paths(observed, "layers", _AFTER_STEPS):
            if len(set(path.values[-1])) == 1:
                continue
            told = [dict(item.split("=") for item in text.split(", ")) for text in path.values[-1]]
            keys = [key for key in told[0] if len({one.get(key) for one in told}) > 1]
            place = layer_place(modules, keys[0]) if keys else None
            if place is not None and place not in done:
                done.add(place)
                seen = ", ".join(f"rank {rank}: {one.get(keys[0])}" for rank, one in enumerate(told[:4]))
                yield self.finding(
                    place,
                    f"`{keys[0]}` of `{path.text}` differs between the ranks, which train one model.",
                    f"after an optimizer step it was {seen}",
                    "Change it on all ranks, not under a condition on the rank.",
                )

    def _learned(
        self, observed: Observed, modules: Sequence[SourceModule], done: set[tuple[str, int]]
    ) -> Iterable[Finding]:
        """Yield what a loss is computed from that each rank updates from its own samples."""
        numbers = [path for path in live_paths(observed, "numbers") if path.differs_in_numbers_last]
        tensors = [path for path in live_paths(observed, "tensors") if path.differs]
        for path in [*tensors, *numbers]:
            name, module = path.names[-1], module_of(modules, path.file)
            if module is None or path.is_constant or len(path.values) < 2 or _OWN_DATA.search(path.text):
                continue
            if len(path.names) > 1 and not (path.stands_still or is_carried(modules, name)):
                continue  # of a batch: `self.inputs = batch`
            if len(path.names) > 1 and is_of_evaluation(module, path):
                continue  # `m["loss"]` of an evaluation is no loss that is trained on
            if (
                not _outlives(module, path)
                or is_drawn(modules, name)
                or not any(name in loss_inputs(one) for one in modules)
            ):
                continue
            place = updates_of(modules, path.names) or place_of(modules, path.file, path.names)
            if place is not None and place not in done and not acts_at(modules, place):
                done.add(place)
                yield self.finding(
                    place,
                    f"`{path.text}` goes into the loss, and each rank updates it from its own samples.",
                    f"in {len(path.values)} looks it changed, and was not the same on all ranks",
                    "Compute its update of all ranks' samples: all_reduce the sums that it is made of.",
                )

    def _tuned(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield thresholds and the like that an evaluation has fitted to each rank's own part."""
        if not is_data_parallel(observed):
            return
        for kind in ("tensors", "numbers"):
            for path in live_paths(observed, kind, ("evaluated", "left")):
                differs = path.differs_in_numbers if kind == "numbers" else path.differs
                module = module_of(modules, path.file)
                if not differs or module is None or not _TUNED.search(path.names[-1]) or "local" in path.text:
                    continue
                if is_of_evaluation(module, path):
                    yield self.finding(
                        place_of(modules, path.file, path.names) or (path.file, 0),
                        f"`{path.text}` is another one on each rank: it was fitted to the rank's own part of the data.",
                        f"after {len(path.values)} evaluations it was not the same on all ranks",
                        "Gather the scores and labels of all ranks first, and fit it to them on all ranks alike.",
                    )

    def _changed_weights(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield wrapped models whose weights parted, although every gradient was the same on all ranks."""
        for number, wrapped in wrappers_of(observed).items():
            parted = _parted_at(observed, number) if wrapped.strategy == "ddp" else None
            if parted is None:
                continue
            states = [module.place(load.node) for module in modules for load in loads_by_one_rank(module)]
            places = [*states, *sorted(set(changes_by_one_rank(modules)))]
            yield self.finding(
                places[0] if places else parted[0],
                _OF_ONE_RANK if states else "Weights are changed on some ranks only, after the ranks had begun alike.",
                f"after {parted[1]} steps the parameters of the wrapped model were no longer the same on all ranks, "
                "and their gradients still were",
                _LOAD_EVERYWHERE
                if states
                else "Make the change on all ranks, or broadcast the weights after it: nothing else does.",
                Severity.ERROR,
            )

    def _ids(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        done: set[tuple[str, int]] = set()
        for path in live_paths(observed, "ids"):
            ranks: tuple[dict[str, int], ...] = path.values[-1]
            if not all(_is_numbering(ids) for ids in ranks) or not (path.is_constant or len(path.values) == 1):
                continue
            if not _VOCABULARY.search(path.text) and not _is_named(ranks[0]):
                continue
            common = set(ranks[0]).intersection(*ranks[1:])
            other = [key for key in sorted(common) if len({ids[key] for ids in ranks}) > 1]
            if len(common) < _MIN_IDS or not other:
                continue
            place = place_of(modules, path.file, path.names) or ("", 0)
            if place in done:
                continue
            done.add(place)
            seen = " and ".join(f"{ids[other[0]]} on rank {rank}" for rank, ids in enumerate(ranks[:4]))
            yield self.finding(
                place,
                f"`{path.text}` gives the same name another number on each rank.",
                f"{len(other)} of {len(common)} names differ: {other[0]!r} is {seen}",
                "+ sorted(names)  # of all data, not of the rank's part: a set has another order in each process",
                Severity.ERROR if len(common) == len(ranks[0]) == len(ranks[-1]) else None,
            )

    def _buffers(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield buffers that differ: those that one method changes together, at the first line that does."""
        groups: dict[object, dict[tuple[str, int], LivePath]] = {}
        for path in live_paths(observed, "buffers", _AFTER_STEPS):  # the last evaluation may have sent rank 0's
            changed = updates_of(modules, path.names) if path.differs and not path.is_constant else None
            place = changed or place_of(modules, path.file, path.names) if path.differs else None
            if place is not None:
                method = _method_at(modules, place) if changed is not None else None
                groups.setdefault(method or place, {}).setdefault(place, path)
        for group in groups.values():
            place, path = min(group.items(), key=lambda item: item[0])
            how = "is the same in every step" if path.is_constant else "changes in training"
            lines = ", ".join(str(line) for _, line in sorted(group)[1:])
            yield self.finding(
                place,
                f"`{path.text}` differs between the ranks: each computes it from its own samples.",
                f"in {len(path.values)} looks it {how}, and was not the same on all ranks"
                + (f"; so were others that the same method changes (line {lines})" if lines else ""),
                "Compute it of all ranks' samples: gather or reduce them first, then update it on all ranks alike.",
            )

    def _copies(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        kinds = [("weights", path) for path in live_paths(observed, "weights")]
        if not any(first.is_sharded for firsts in observed.by_rank(FirstUpdate) for first in firsts):  # their shards
            kinds += [("tensors", path) for path in live_paths(observed, "tensors") if _AVERAGED.search(path.text)]
        for kind, path in kinds:
            if not path.differs or (kind == "tensors" and (path.is_constant or _OF_A_BATCH.search(path.names[-1]))):
                continue
            module = module_of(modules, path.file)
            if len(path.names) == 1 and module is not None and is_own_sum(module, path.function, path.names[0]):
                continue
            place = guarded_use(modules, path.names[0]) or place_of(modules, path.file, path.names)
            if place is not None and any(made for made in observed.by_rank(ModelWrapped)):
                yield self.finding(
                    place,
                    f"`{path.text}` differs between the ranks, which train the same weights.",
                    f"it differed in {len(path.values)} looks after optimizer steps",
                    "Update it on all ranks by the same rule, or broadcast rank 0's.",
                )

    def _statistics(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        done: set[tuple[str, int]] = set()
        numbers = [path for path in live_paths(observed, "numbers") if path.differs_in_numbers]
        trained = {(path.file, path.function, path.names[0]) for path in live_paths(observed, "layers")}
        for path in [*live_paths(observed, "tensors"), *numbers]:
            name = path.names[-1]
            is_in_model = len(path.names) > 1 and (path.file, path.function, path.names[0]) in trained
            is_named = bool(_STATISTIC.search(name)) or (is_in_model and not _OWN_DATA.search(name))
            is_constant = path.is_constant and path.differs and path not in numbers and is_named
            pattern = _ADAPTED if path in numbers else _STATISTIC
            is_held = len(path.names) > 1 and path.names[-2] not in _SETTINGS
            parted = path in numbers or path.differs
            is_changed = is_held and parted and not path.is_constant and bool(pattern.search(name))
            is_adapted = is_changed and is_computed_with(modules, name) and not is_drawn(modules, name)
            if not (is_constant or is_adapted) or _OF_A_BATCH.search(name) or "local" in path.text:
                continue
            place = updating_call(modules, path.names) or updates_of(modules, path.names) if is_adapted else None
            place = place or place_of(modules, path.file, path.names)
            if place is not None and place not in done:
                done.add(place)
                yield self.finding(
                    place,
                    f"`{path.text}` is another one on each rank: it was computed from the rank's own part of the data.",
                    f"in {len(path.values)} looks it {'changed' if is_adapted else 'stayed the same'}, "
                    "and was not the same on all ranks",
                    "Compute it of the whole data on all ranks, or sum its parts with all_reduce.",
                )


def _method_at(modules: Sequence[SourceModule], place: tuple[str, int]) -> object | None:
    """Return the method that a line belongs to; None: it is in none."""
    module = module_of(modules, place[0])
    statement = statement_at(module, place[1]) if module is not None else None
    if module is None or statement is None:
        return None
    function = function_around(module, statement)
    is_method = function is not None and isinstance(next(module.around(function), None), ast.ClassDef)
    return function if is_method else None


def _outlives(module: SourceModule, path: LivePath) -> bool:
    """Return whether a path is one of an object, or a variable that keeps its value from batch to batch."""
    functions = module.functions.get(path.function, [])
    scope = functions[0] if functions else module.tree
    if begins_anew(module, scope, path.names[0]) and not _STATISTIC.search(path.names[-1]):
        return False  # what is collected for the batches of one turn
    if len(path.names) > 1:
        return path.names[-2] not in _SETTINGS and not path.names[-1].isdigit()
    return len(functions) < 2 and outlives_batches(module, scope, path.names[0])


def _is_numbering(ids: dict[str, int]) -> bool:
    """Return whether numbers are those of an enumeration."""
    first = min(ids.values())
    return first in (0, 1) and sorted(ids.values()) == list(range(first, first + len(ids)))


def _is_named(ids: dict[str, int]) -> bool:
    """Return whether keys are words: not paths, numbers or names of samples."""
    return all(key.isidentifier() and not any(char.isdigit() for char in key) for key in ids)


def _parted_at(observed: Observed, wrapper: int) -> tuple[tuple[str, int], int] | None:
    """Return where, and after how many steps, weights were no longer the same on all ranks; gradients always were."""
    key = str(wrapper)
    was_equal = False
    for steps in steps_together(observed):
        taken = [step.taken for step in steps]
        weights = {one.parameter_hash.get(key) for one in taken}
        if weights == {None}:
            continue  # the step of another model's optimizer
        is_same_update = len({(one.gradient_hash.get(key), one.learning_rate) for one in taken}) == 1
        if None in weights or not is_same_update:
            return None
        if len(weights) == 1:
            was_equal = True
        elif was_equal:
            return (taken[0].file, taken[0].line), taken[0].number
        else:
            return None
    return None
